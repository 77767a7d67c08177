-- The queue. Only src/queue/ writes these tables; the CHECKs repeat what it promises, so that a mistake elsewhere
-- (a hand-written UPDATE, a later version) is refused instead of believed.

-- UUID version 7: 48 bits of milliseconds, then random bits, so ids sort by time of creation. Postgres has its own
-- only from version 18 on. For rows inserted in SQL; the library makes its ids itself.
CREATE FUNCTION jobs_new_id() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
    SELECT encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                    PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                    FROM 1 FOR 6),
            52, 1), 53, 1),
        'hex')::uuid
$$;

CREATE TABLE jobs (
    id               uuid        PRIMARY KEY DEFAULT jobs_new_id(),
    -- text, not an enum: other people's kinds need no migration of ours
    kind             text        NOT NULL,
    payload          jsonb       NOT NULL,
    status           text        NOT NULL DEFAULT 'queued',
    attempts         integer     NOT NULL DEFAULT 0,
    max_attempts     integer     NOT NULL DEFAULT 3,
    last_error       text,
    run_at           timestamptz NOT NULL DEFAULT now(),
    -- the lease: who holds it, since when it was last renewed, and for how long that holds
    locked_at        timestamptz,
    locked_by        text,
    lease_seconds    integer     NOT NULL DEFAULT 30,
    -- unique per claim; kept after a finish, so that a finish sent twice knows itself; cleared by the rescue
    claim_token      uuid,
    cancel_requested boolean     NOT NULL DEFAULT false,
    idempotency_key  text,
    created_at       timestamptz NOT NULL DEFAULT now(),
    updated_at       timestamptz NOT NULL DEFAULT now(),

    priority         smallint    NOT NULL DEFAULT 0,
    suspended        boolean     NOT NULL DEFAULT false,
    -- runAt as the spec has it, to tell an edit from the run_at of a back-off
    wanted_run_at    timestamptz,
    timeout_seconds  integer     NOT NULL DEFAULT 300,
    -- the newest attempt
    started_at       timestamptz,
    finished_at      timestamptz,
    worker           text,
    result           jsonb,
    -- what an attempt leaves for the next one
    progress         jsonb,
    -- ended attempts, oldest first, at most 20
    history          jsonb       NOT NULL DEFAULT '[]',
    -- since when the job has been handed back without cost, again and again
    handed_back_at   timestamptz,
    lost_leases      smallint    NOT NULL DEFAULT 0,
    last_retry       text,

    -- whose job it is: the install, the namespace, the resource. Rows inserted in SQL have no namespace or owner.
    install          text        NOT NULL DEFAULT 'default',
    namespace        text,
    owner_uid        uuid,
    -- raised by each change that a status shows; due until every resource's status shows the newest
    revision         bigint      NOT NULL DEFAULT 1,
    mirror_due       boolean     NOT NULL DEFAULT false,

    CONSTRAINT jobs_kind_is_a_name CHECK (kind ~ '^[a-z][a-z0-9_]{0,62}$'),
    CONSTRAINT jobs_status_known CHECK (status IN
        ('queued', 'running', 'retrying', 'succeeded', 'failed_permanent', 'cancelled')),
    CONSTRAINT jobs_attempts_nonneg CHECK (attempts >= 0),
    CONSTRAINT jobs_max_attempts_positive CHECK (max_attempts BETWEEN 1 AND 100),
    CONSTRAINT jobs_attempts_le_max CHECK (attempts <= max_attempts),
    CONSTRAINT jobs_waiting_has_an_attempt_left CHECK (status NOT IN ('queued', 'retrying') OR attempts < max_attempts),
    CONSTRAINT jobs_waiting_is_not_cancelled CHECK (status NOT IN ('queued', 'retrying') OR NOT cancel_requested),
    CONSTRAINT jobs_key_length CHECK (char_length(idempotency_key) BETWEEN 1 AND 255),
    CONSTRAINT jobs_priority_range CHECK (priority BETWEEN -1000 AND 1000),
    CONSTRAINT jobs_timeout_range CHECK (timeout_seconds BETWEEN 1 AND 86400),
    CONSTRAINT jobs_lease_positive CHECK (lease_seconds BETWEEN 1 AND 86400),
    CONSTRAINT jobs_last_error_bounded CHECK (octet_length(last_error) <= 4096),
    CONSTRAINT jobs_history_is_a_list CHECK (jsonb_typeof(history) = 'array'),
    -- infinity, and years of more than four digits, read as no time at all in one client or another
    CONSTRAINT jobs_times_finite CHECK (
        least(run_at, wanted_run_at, created_at, updated_at, locked_at, started_at, finished_at, handed_back_at)
            >= '0001-01-01 00:00:00+00'
        AND greatest(run_at, wanted_run_at, created_at, updated_at, locked_at, started_at, finished_at, handed_back_at)
            < '10000-01-01 00:00:00+00')
);

-- A finish updates rows in place and leaves dead ones in the claim's index: clean up early and without pauses.
ALTER TABLE jobs SET (
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.05);

-- The claim walks this.
CREATE INDEX jobs_ready_idx ON jobs (install, priority DESC, run_at, id)
    WHERE status IN ('queued', 'retrying') AND NOT suspended;

-- The rescue, the heartbeat's second look and a lost claim's take-up walk this.
CREATE INDEX jobs_running_idx ON jobs (install, locked_at) WHERE status = 'running';

-- One live or succeeded row per key; failed and cancelled rows free it.
CREATE UNIQUE INDEX jobs_idempotency_key_uidx ON jobs (install, coalesce(namespace, ''), idempotency_key)
    WHERE idempotency_key IS NOT NULL AND status NOT IN ('failed_permanent', 'cancelled');

-- What the mirror has yet to show.
CREATE INDEX jobs_mirror_due_idx ON jobs (install, id) WHERE mirror_due;

-- What retention may remove.
CREATE INDEX jobs_ended_idx ON jobs (install, finished_at) WHERE status IN ('succeeded', 'failed_permanent', 'cancelled');

-- Which resources stand for a job: its owner, and those that share it by key.
CREATE TABLE job_resources (
    uid               uuid        PRIMARY KEY,
    job_id            uuid        NOT NULL,
    install           text        NOT NULL,
    namespace         text        NOT NULL,
    name              text        NOT NULL,
    -- the newest revision whose status was written
    mirrored_revision bigint      NOT NULL DEFAULT 0,
    -- the resource is being deleted and waits for the row to end
    released          boolean     NOT NULL DEFAULT false,
    created_at        timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX job_resources_job_idx ON job_resources (job_id);

-- Keys of succeeded jobs whose rows retention has removed: a key outlives its row.
CREATE TABLE job_keys (
    install         text        NOT NULL,
    namespace       text        NOT NULL,
    idempotency_key text        NOT NULL,
    job_id          uuid        NOT NULL,
    kind            text        NOT NULL,
    payload_sha256  bytea       NOT NULL,
    attempts        integer     NOT NULL,
    finished_at     timestamptz NOT NULL,
    PRIMARY KEY (install, namespace, idempotency_key)
);

-- What a claim walks goes by lane, and what concerns one value is checked where it is assigned instead of at every
-- change of its row (docs/design/queue.md has the figures). Rewrites `jobs`: some seconds for a million rows, during
-- which it is locked.
SET LOCAL lock_timeout = '10s';

CREATE DOMAIN job_kind AS text COLLATE "C"
    CONSTRAINT jobs_kind_is_a_name CHECK (VALUE ~ '^[a-z][a-z0-9_]{0,62}$');
CREATE DOMAIN job_key AS text COLLATE "C"
    CONSTRAINT jobs_key_length CHECK (char_length(VALUE) BETWEEN 1 AND 255);
CREATE DOMAIN job_priority AS smallint CONSTRAINT jobs_priority_range CHECK (VALUE BETWEEN -1000 AND 1000);
CREATE DOMAIN job_timeout AS integer CONSTRAINT jobs_timeout_range CHECK (VALUE BETWEEN 1 AND 86400);
CREATE DOMAIN job_lease AS integer CONSTRAINT jobs_lease_positive CHECK (VALUE BETWEEN 1 AND 86400);
CREATE DOMAIN job_error AS text CONSTRAINT jobs_last_error_bounded CHECK (octet_length(VALUE) <= 4096);
CREATE DOMAIN job_history AS jsonb CONSTRAINT jobs_history_is_a_list CHECK (jsonb_typeof(VALUE) = 'array');
-- infinity, and years of more than four digits, read as no time at all in one client or another
CREATE DOMAIN job_time AS timestamptz
    CONSTRAINT jobs_times_finite CHECK (VALUE >= '0001-01-01 00:00:00+00' AND VALUE < '10000-01-01 00:00:00+00');

DROP INDEX jobs_ready_idx;
DROP INDEX jobs_running_idx;
-- The purge walks the primary key, which is in the order of creation: an index more would cost every finish an entry.
DROP INDEX jobs_ended_idx;

ALTER TABLE jobs
    DROP CONSTRAINT jobs_kind_is_a_name,
    DROP CONSTRAINT jobs_key_length,
    DROP CONSTRAINT jobs_priority_range,
    DROP CONSTRAINT jobs_timeout_range,
    DROP CONSTRAINT jobs_lease_positive,
    DROP CONSTRAINT jobs_last_error_bounded,
    DROP CONSTRAINT jobs_history_is_a_list,
    DROP CONSTRAINT jobs_times_finite,
    ALTER kind            TYPE job_kind,
    ALTER idempotency_key TYPE job_key,
    ALTER priority        TYPE job_priority,
    ALTER timeout_seconds TYPE job_timeout,
    ALTER lease_seconds   TYPE job_lease,
    ALTER last_error      TYPE job_error,
    ALTER history         TYPE job_history,
    ALTER run_at          TYPE job_time,
    ALTER wanted_run_at   TYPE job_time,
    ALTER locked_at       TYPE job_time,
    ALTER created_at      TYPE job_time,
    ALTER updated_at      TYPE job_time,
    ALTER started_at      TYPE job_time,
    ALTER finished_at     TYPE job_time,
    ALTER handed_back_at  TYPE job_time,
    -- compared byte by byte: an index that only finds and never shows needs no language's order
    ALTER status          TYPE text COLLATE "C",
    ALTER install         TYPE text COLLATE "C",
    ALTER namespace       TYPE text COLLATE "C";

-- A lane (install, kind, namespace, whether its jobs want care, priority), then its jobs in their order. A survey
-- reads the first job of each lane, a claim goes on in one from a given place.
CREATE INDEX jobs_ready_idx ON jobs (install, kind, coalesce(namespace, ''),
        (attempts + 1 >= max_attempts OR lost_leases >= 2), priority, run_at, id)
    WHERE status IN ('queued', 'retrying') AND NOT suspended;

-- Running jobs, for what asks for all of them: the rescue, and the taking up of a lost claim. Said in words that
-- status = 'running' does not imply, so that a heartbeat or finish of jobs by their ids can't be planned as a walk over
-- all that are running.
CREATE INDEX jobs_running_idx ON jobs (install, locked_at) WHERE starts_with(status, 'running');

-- The lowest id that a row made at this time can have.
CREATE FUNCTION jobs_first_id(at timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT encode(substring(int8send((extract(epoch FROM at) * 1000)::bigint) FROM 3) || '\x70008000000000000000', 'hex')::uuid
$$;

-- A job inserted in plain SQL may not take a key that a succeeded job has left behind. It looks after the unique
-- index has spoken, so it sees what a purge that the index had to wait for has written.
CREATE FUNCTION jobs_key_is_free() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM job_keys WHERE install = NEW.install AND namespace = coalesce(NEW.namespace, '')
        AND idempotency_key = NEW.idempotency_key;
    IF FOUND THEN
        RAISE unique_violation USING
            MESSAGE = 'a job that succeeded holds this idempotency_key',
            CONSTRAINT = 'jobs_idempotency_key_uidx', TABLE = 'jobs';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER jobs_key_is_free AFTER INSERT ON jobs
    FOR EACH ROW WHEN (NEW.idempotency_key IS NOT NULL) EXECUTE FUNCTION jobs_key_is_free();

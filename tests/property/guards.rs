//! The guards that live in SQL, each with the words that are taken out and the case that misses them.

use crate::teeth::Guard;

const fn missed(by: Option<u64>, of: &'static str, words: &'static str, instead: &'static str) -> Guard {
    Guard { missed_by: by, of, words, instead }
}

const CLAIM: &str = "ORDER BY j.priority DESC, j.run_at, j.id LIMIT";
const CLAIM_LANES: &str = "WITH ORDINALITY AS l(kind";
const SURVEY: &str = "AS due_in";
const TAKE_UP: &str = "starts_with(j.status, 'running') AND j.claim_token = $2";
const HEARTBEAT: &str = "UPDATE jobs j SET locked_at = now(), lease_seconds";
const LOOK_FOR_CANCELS: &str = "SELECT m.id, m.token, j.cancel_requested";
const SUCCEED: &str = "AS e(id, token, result) CROSS JOIN";
const FAIL: &str = "progress, outcome) CROSS JOIN";
const SUCCEED_MANY: &str = "AS e(id, token, result) WHERE";
const FAIL_MANY: &str = "progress, outcome) WHERE";
const FAILED: &str = "SET status = CASE WHEN cancel_requested";
const WHY_MISSING: &str = "SELECT j.id, j.claim_token, j.status FROM jobs j JOIN unnest";
const FINALIZE: &str = "AND cancel_requested RETURNING status";
const EARLIER_FINISH: &str = "SELECT status FROM jobs WHERE id = $1 AND claim_token = $2";
const CANCEL: &str = "SET cancel_requested = true";
const STALE: &str = "locked_at IS NULL OR locked_at <";
const RESCUE: &str = "'outcome', 'lease_lost'";
const RETRY: &str = "SET status = 'queued', attempts = 0";
const ENDED: &str = "AND NOT mirror_due";
const KEEP_KEY: &str = "INSERT INTO job_keys";
const FORGET_KEY: &str = "DELETE FROM job_keys";
const KEPT_KEY: &str = "SELECT EXISTS (SELECT FROM job_keys";
const HOLDER: &str = "cancel_requested AND status = 'running' AS ending";
const KEPT_HOLDER: &str = "payload_sha256 = sha256(convert_to($5::jsonb";
const BULK_INSERT: &str = "AS i(id, kind, payload, max_attempts";
const BULK_HOLDERS: &str = "SELECT i.n, h.id, h.same_work";
const RELEASED: &str = "SELECT EXISTS (SELECT FROM job_releases";
const EDIT: &str = "SET priority = $2, suspended = $3";
const ACKNOWLEDGE: &str = "UPDATE job_resources r SET mirrored_revision";
const HEIR: &str = "AND uid <> $2 AND NOT released";
const PASS_ON: &str = "WITH passed AS";
const DUE: &str = "LEFT JOIN job_resources r ON r.job_id = j.id AND r.mirrored_revision < j.revision";
const GET: &str = "FROM jobs WHERE id = $1 AND install = $2";

const ANY_INSTALL: &str = "$1::text IS NOT NULL";
const WAITS: &str = "status IN ('queued', 'retrying') AND ";
const RUNS_FOR_E: &str = "CASE WHEN j.status = 'running' THEN j.claim_token = e.token END";
const RUNS_FOR_M: &str = "CASE WHEN j.status = 'running' THEN j.claim_token = m.token END";
const CAREFUL: &str = "(attempts + 1 >= max_attempts OR lost_leases >= 2) = l.careful";

pub const GUARDS: &[Guard] = &[
    missed(Some(1), CLAIM, "status IN ('queued', 'retrying') AND ", ""),
    missed(Some(0), CLAIM, " AND NOT suspended", ""),
    missed(Some(4), CLAIM, "run_at <= now()", "run_at IS NOT NULL"),
    missed(Some(5), CLAIM, "kind = k.kind", "kind IS NOT NULL"),
    missed(Some(0), CLAIM, "install = $1", ANY_INSTALL),
    missed(Some(7), CLAIM, "j.priority DESC, ", ""),
    missed(Some(4), CLAIM, "j.run_at, j.id LIMIT", "j.id LIMIT"),
    missed(None, CLAIM, CAREFUL, "true"),
    missed(Some(0), CLAIM, "attempts = attempts + 1, ", ""),
    missed(Some(4), CLAIM, "claim_token = $3", "claim_token = coalesce(claim_token, $3)"),
    missed(Some(31), CLAIM_LANES, WAITS, ""),
    missed(Some(4), CLAIM_LANES, "AND NOT suspended", ""),
    missed(Some(19), CLAIM_LANES, "AND run_at <= now()", ""),
    missed(Some(4), CLAIM_LANES, "AND kind = l.kind", ""),
    missed(Some(61), CLAIM_LANES, "AND coalesce(namespace, '') = l.namespace", ""),
    missed(Some(38), CLAIM_LANES, "(attempts + 1 >= max_attempts OR lost_leases >= 2) = l.careful", "true"),
    missed(Some(275), CLAIM_LANES, "lost_leases >= 2", "false"),
    missed(Some(38), CLAIM_LANES, "AND priority = l.priority", ""),
    missed(Some(46), CLAIM_LANES, "install = $1", ANY_INSTALL),
    missed(Some(58), CLAIM_LANES, "ORDER BY run_at, id", "ORDER BY id"),
    missed(Some(4), CLAIM_LANES, "attempts = attempts + 1, ", ""),
    missed(Some(96), CLAIM_LANES, "claim_token = $3", "claim_token = coalesce(claim_token, $3)"),
    missed(Some(9), SURVEY, "status IN ('queued', 'retrying') AND ", ""),
    missed(Some(5), SURVEY, " AND NOT suspended", ""),
    missed(Some(5), SURVEY, "install = $1", ANY_INSTALL),
    missed(Some(4), SURVEY, "kind = k.kind AND", ""),
    missed(None, TAKE_UP, "starts_with(j.status, 'running') AND ", ""),
    missed(Some(4), TAKE_UP, "j.claim_token = $2", "$2::uuid IS NOT NULL"),
    missed(Some(163), HEARTBEAT, "AND claim_token = m.token", ""),
    missed(Some(122), HEARTBEAT, "AND status = 'running'", ""),
    missed(Some(4), LOOK_FOR_CANCELS, RUNS_FOR_M, "j.status = 'running'"),
    missed(Some(122), LOOK_FOR_CANCELS, RUNS_FOR_M, "j.claim_token = m.token"),
    missed(Some(44), SUCCEED, "AND claim_token = e.token", ""),
    missed(Some(39), SUCCEED, "AND status = 'running'", ""),
    missed(Some(150), SUCCEED_MANY, RUNS_FOR_E, "j.status = 'running'"),
    missed(None, SUCCEED_MANY, RUNS_FOR_E, "j.claim_token = e.token"),
    missed(Some(29), FAIL, "AND claim_token = e.token", ""),
    missed(Some(19), FAIL, "AND status = 'running'", ""),
    missed(Some(150), FAIL_MANY, RUNS_FOR_E, "j.status = 'running'"),
    missed(None, FAIL_MANY, RUNS_FOR_E, "j.claim_token = e.token"),
    missed(Some(60), FAILED, "CASE WHEN cancel_requested THEN 'cancelled' ELSE e.status END", "e.status"),
    missed(Some(60), FAILED, "WHEN e.free AND NOT cancel_requested", "WHEN e.free"),
    missed(Some(1), FAILED, "THEN attempts - 1", "THEN attempts"),
    missed(None, FAILED, "coalesce(handed_back_at, now())", "now()"),
    missed(
        Some(127),
        FAILED,
        "CASE WHEN e.free THEN coalesce(handed_back_at, now()) END",
        "coalesce(handed_back_at, now())",
    ),
    missed(Some(60), FAILED, "AND NOT cancel_requested THEN now()", "THEN now()"),
    missed(Some(3), WHY_MISSING, "AND j.claim_token = e.token", ""),
    missed(Some(217), FINALIZE, "AND claim_token = $2", "AND $2::uuid IS NOT NULL"),
    missed(None, FINALIZE, "AND status = 'running'", ""),
    missed(Some(6), FINALIZE, "AND cancel_requested RETURNING", "RETURNING"),
    missed(Some(1), EARLIER_FINISH, "AND claim_token = $2", "AND $2::uuid IS NOT NULL"),
    missed(None, CANCEL, "AND NOT cancel_requested", ""),
    missed(Some(1), CANCEL, "AND status IN ('queued', 'retrying', 'running')", ""),
    missed(Some(60), CANCEL, "CASE WHEN status = 'running' THEN status ELSE 'cancelled' END", "'cancelled'"),
    missed(Some(1), CANCEL, "AND install = $2", "AND $2::text IS NOT NULL"),
    missed(Some(1), STALE, "AND starts_with(status, 'running')", ""),
    missed(Some(4), STALE, "locked_at < now() - make_interval(secs => lease_seconds)", "true"),
    missed(Some(112), STALE, "install = $1", ANY_INSTALL),
    missed(Some(3), RESCUE, "claim_token = NULL, ", ""),
    missed(Some(275), RESCUE, "lost_leases = least(lost_leases + 1, 1000), ", ""),
    missed(Some(183), RESCUE, "handed_back_at = NULL, ", ""),
    missed(Some(0), RETRY, "AND status IN ('failed_permanent', 'cancelled')", ""),
    missed(Some(105), RETRY, "AND install = $3", "AND $3::text IS NOT NULL"),
    missed(Some(177), RETRY, "last_retry IS DISTINCT FROM $2", "true"),
    missed(None, RETRY, "claim_token = NULL, ", ""),
    missed(None, RETRY, "handed_back_at = NULL, ", ""),
    missed(Some(190), RETRY, "lost_leases = 0, ", ""),
    missed(Some(18), RETRY, "cancel_requested = false, ", ""),
    missed(Some(343), RETRY, "suspended = false, ", ""),
    missed(Some(5), ENDED, "AND status IN ('succeeded', 'failed_permanent', 'cancelled')", ""),
    missed(Some(1), ENDED, "finished_at < now() - make_interval(secs => $2)", "$2::float8 IS NOT NULL"),
    missed(Some(5), ENDED, "AND NOT mirror_due", ""),
    missed(Some(5), ENDED, "install = $1", ANY_INSTALL),
    missed(Some(5), KEEP_KEY, "AND status = 'succeeded'", ""),
    missed(Some(6), KEEP_KEY, "WHERE id = ANY($1)", "WHERE id = ANY($1) AND false"),
    missed(Some(374), FORGET_KEY, "install = $1", ANY_INSTALL),
    missed(None, FORGET_KEY, "finished_at < now() - make_interval(secs => $2)", "$2::float8 IS NOT NULL"),
    missed(None, KEPT_KEY, "SELECT EXISTS", "SELECT $1 = '' AND EXISTS"),
    missed(Some(3), HOLDER, "kind = $4", "$4::text IS NOT NULL"),
    missed(Some(4), HOLDER, "payload = $5", "$5::jsonb IS NOT NULL"),
    missed(None, HOLDER, "cancel_requested AND status = 'running' AS", "false AS"),
    missed(Some(54), HOLDER, "AND status NOT IN ('failed_permanent', 'cancelled')", ""),
    missed(Some(9), HOLDER, "install = $1", ANY_INSTALL),
    missed(Some(10), HOLDER, "coalesce(namespace, '') = coalesce($2, '')", "$2::text IS NULL"),
    missed(Some(7), KEPT_HOLDER, "kind = $4", "$4::text IS NOT NULL"),
    missed(Some(33), KEPT_HOLDER, "payload_sha256 = sha256", "'' <> sha256"),
    missed(None, KEPT_HOLDER, "install = $1", ANY_INSTALL),
    missed(None, KEPT_HOLDER, "namespace = coalesce($2, '')", "coalesce($2, '') <> '-'"),
    missed(Some(7), BULK_INSERT, "WHERE k.install = $4", "WHERE false"),
    missed(Some(66), BULK_INSERT, "k.install = $4", "$4::text IS NOT NULL"),
    missed(Some(9), BULK_INSERT, "h.install = $4", "$4::text IS NOT NULL"),
    missed(Some(18), BULK_INSERT, "AND h.status NOT IN ('failed_permanent', 'cancelled')", ""),
    missed(Some(5), BULK_HOLDERS, "j.kind = i.kind AND ", ""),
    missed(Some(9), BULK_HOLDERS, "AND j.payload = i.payload", ""),
    missed(None, BULK_HOLDERS, "j.cancel_requested AND j.status = 'running' AS", "false AS"),
    missed(None, BULK_HOLDERS, "AND j.status NOT IN ('failed_permanent', 'cancelled')", ""),
    missed(Some(9), BULK_HOLDERS, "j.install = $1 AND", ""),
    missed(Some(112), BULK_HOLDERS, "coalesce(j.namespace, '') = '' AND", ""),
    missed(Some(7), BULK_HOLDERS, "k.kind = i.kind AND", ""),
    missed(Some(7), BULK_HOLDERS, "k.payload_sha256 = sha256", "'' <> sha256"),
    missed(None, BULK_HOLDERS, "k.install = $1 AND", ""),
    missed(None, BULK_HOLDERS, "k.namespace = '' AND", ""),
    missed(Some(17), RELEASED, "released_at > now() - make_interval(secs => $2)", "$2::int4 < 0"),
    missed(Some(5), RELEASED, "released_at > now() - make_interval(secs => $2)", "$2::int4 > 0"),
    missed(Some(20), RELEASED, "uid = $1", "$1::uuid IS NOT NULL"),
    missed(None, EDIT, "owner_uid = $1 AND", ""),
    missed(Some(9), EDIT, "AND status IN ('queued', 'retrying')", ""),
    missed(None, EDIT, "greatest($4, attempts + 1)", "$4"),
    missed(
        Some(4),
        EDIT,
        "CASE WHEN wanted_run_at IS DISTINCT FROM $6 THEN coalesce($6, now()) ELSE run_at END",
        "coalesce($6, now())",
    ),
    missed(None, ACKNOWLEDGE, "AND r.mirrored_revision < $2 RETURNING", "RETURNING"),
    missed(Some(132), ACKNOWLEDGE, "AND j.revision = $2", ""),
    missed(None, ACKNOWLEDGE, "AND r.uid <> $1 AND r.mirrored_revision < $2", "AND false"),
    missed(None, HEIR, "AND NOT released", ""),
    missed(None, PASS_ON, "CASE WHEN owner_uid = $2 THEN $3 ELSE owner_uid END", "$3"),
    missed(None, PASS_ON, "AND status IN ('queued', 'retrying', 'running') AS on", "AS on"),
    missed(Some(0), DUE, "install = $1 AND", ""),
    missed(None, DUE, "AND r.mirrored_revision < j.revision", ""),
    missed(Some(1), GET, "AND install = $2", "AND $2::text IS NOT NULL"),
];

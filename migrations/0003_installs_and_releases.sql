-- New tables alone: nothing here waits for a table in use, and a program one version older does not know them.
SET LOCAL lock_timeout = '10s';

-- Which cluster an install's rows and keys belong to, by the uid of its namespace kube-system.
CREATE TABLE job_installs (
    install    text        PRIMARY KEY,
    cluster    text        NOT NULL,
    bound_at   timestamptz NOT NULL DEFAULT now(),
    -- when another cluster's rows were taken over; none when there was no other
    adopted_at timestamptz
);

-- Resources that were let go a short while ago: a controller that led until then must not enqueue them any more.
CREATE TABLE job_releases (
    uid         uuid        PRIMARY KEY,
    released_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX job_releases_time_idx ON job_releases (released_at);

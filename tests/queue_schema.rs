//! The schema: what plain SQL may do, what the database refuses, and migrations that race.

mod support;

use support::db::{Database, claim};

#[tokio::test]
async fn a_job_inserted_from_psql_gets_a_version_7_id_and_runs() {
    let db = Database::new().await;
    db.run("INSERT INTO jobs (kind, payload) VALUES ('test_kind', '{\"n\": 1}')").await;
    let (id, version, age): (uuid::Uuid, i32, f64) = db
        .one(
            "SELECT id, get_byte(uuid_send(id), 6) >> 4, \
             abs(extract(epoch FROM now()) * 1000 - ('x' || encode(substring(uuid_send(id) FOR 6), 'hex'))::bit(48)::bigint)::float8 \
             FROM jobs",
        )
        .await;
    assert_eq!(version, 7);
    assert!(age < 60_000.0, "the id holds the time of creation, {age} ms off");
    let claimed = claim(&db.queue()).await;
    assert_eq!((claimed.id(), claimed.attempt(), claimed.max_attempts()), (id, 1, 3));
    assert_eq!(claimed.payload().get(), "{\"n\": 1}");
}

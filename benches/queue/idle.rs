//! What a worker costs that has nothing to do.

use std::time::Duration;

use sqlx::Connection;
use tokio::time::sleep;

use crate::Outcome;
use crate::child::Child;
use crate::contenders::Contender;
use crate::database::Server;
use crate::load::Load;

pub struct Idle {
    pub queries_per_second: f64,
    pub rss_mib: f64,
    /// Of one core, in percent.
    pub cpu_percent: f64,
}

const SETTLE: Duration = Duration::from_secs(5);

pub async fn idle(server: &Server, who: &Contender, time: Duration) -> Outcome<Idle> {
    let database = server.fresh(who, Load::Empty).await?;
    let mut watcher = server.connect(&database).await?;
    // The server has the module loaded and counts nothing, but here.
    sqlx::raw_sql("CREATE EXTENSION pg_stat_statements").execute(&mut watcher).await?;
    for setting in ["pg_stat_statements.track TO 'top'", "pg_stat_statements.track_utility TO true"] {
        let sql = format!("ALTER DATABASE {database} SET {setting}");
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut watcher).await?;
    }
    let mut child = Child::start(who, &["idle"], &server.url(&database))?;
    child.ready()?;
    child.go()?;
    sleep(SETTLE).await;
    sqlx::raw_sql("SELECT pg_stat_statements_reset()").execute(&mut watcher).await?;
    let before = child.cpu_seconds();
    sleep(time).await;
    let used = child.cpu_seconds() - before;
    // The watcher's own session is from before the setting, so it isn't counted.
    let (calls,): (f64,) = sqlx::query_as(
        "SELECT coalesce(sum(calls), 0)::float8 FROM pg_stat_statements \
         WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())",
    )
    .fetch_one(&mut watcher)
    .await?;
    let rss_mib = child.memory_mib("VmRSS");
    drop(child);
    watcher.close().await?;
    server.drop(&database).await?;
    let seconds = time.as_secs_f64();
    Ok(Idle { queries_per_second: calls / seconds, rss_mib, cpu_percent: used / seconds * 100.0 })
}

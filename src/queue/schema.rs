//! Migrations: forward only, by one process at a time, over a connection of their own.

use std::time::Duration;

use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection, Row};
use tokio::time::timeout;

use super::Queue;
use super::error::{Error, Result};

/// A table of our own name: an application in the same database may use the same migration library.
const TABLE: &str = "jobrequest_migrations";
/// How long one try to connect may take: a host that swallows packets would hold it for minutes, one that takes the
/// connection and says nothing for ever.
const CONNECT: Duration = Duration::from_secs(10);

fn migrator() -> Migrator {
    let mut migrator = sqlx::migrate!();
    migrator.dangerous_set_table_name(TABLE);
    // A newer version's migrations are not ours to judge: it may be rolled back to this one.
    migrator.set_ignore_missing(true);
    migrator
}

/// What the database holds, seen from this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemaState {
    Current,
    /// This many migrations are missing: `jobrequest migrate` brings them.
    Behind(usize),
}

/// Brings the schema up to this version. Any number of processes may call this at once: they take turns by an
/// advisory lock on a connection that each opens for it and closes after, so a killed one holds nothing up.
///
/// # Errors
/// [`Error::Db`], [`Error::Timeout`] when there was no way to connect within 10 s; what has been applied stays, and a
/// repeat goes on from there.
pub async fn migrate(database: &PgConnectOptions) -> Result<()> {
    let mut connection =
        timeout(CONNECT, database.connect()).await.map_err(|_| Error::Timeout { seconds: CONNECT.as_secs() })??;
    // Never queue behind a long transaction with all of the application's queries behind us.
    sqlx::query("SET lock_timeout = '10s'").execute(&mut connection).await?;
    let migrator = migrator();
    let mut tries = 0;
    let outcome = loop {
        match migrator.run_direct(None, &mut connection, false).await {
            // Waiting for our turn counts against lock_timeout too.
            Err(MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _))
                if tries < 30 && lock_timed_out(&error) =>
            {
                tries += 1;
                tracing::info!("another transaction holds a lock that the migration needs: trying again");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            outcome => break outcome,
        }
    };
    // Closed whatever happened: the advisory lock is the session's.
    drop(connection.close().await);
    outcome.map_err(|error| match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => Error::Db(error),
        other => Error::Db(sqlx::Error::Migrate(Box::new(other))),
    })
}

fn lock_timed_out(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(e) if e.code().as_deref() == Some("55P03"))
}

impl Queue {
    /// Whether the schema is at least this version's. Asked on a connection of its own, so that an error says what is
    /// wrong with the database: a pool would only say that it has no connection.
    ///
    /// # Errors
    /// [`Error::Db`], [`Error::Timeout`]; [`Error::UnknownPooler`] as far as that shows.
    pub async fn schema_state(&self) -> Result<SchemaState> {
        let applied: Result<Vec<i64>> = self
            .bounded(async {
                let mut connection = self.pool.pool().connect_options().connect().await?;
                if !self.settings.transaction_pooler && has_a_past(&mut connection).await? {
                    return Err(Error::UnknownPooler);
                }
                let sql = sqlx::raw_sql("SELECT version FROM jobrequest_migrations WHERE success");
                let rows = sql.fetch_all(&mut connection).await?;
                connection.close().await?;
                Ok(rows.iter().map(|row| row.try_get(0)).collect::<sqlx::Result<_>>()?)
            })
            .await;
        let applied = match applied {
            Ok(applied) => applied,
            // 42P01: the table is not there yet.
            Err(Error::Db(sqlx::Error::Database(e))) if e.code().as_deref() == Some("42P01") => Vec::new(),
            Err(error) => return Err(error),
        };
        let missing = migrator().iter().filter(|m| !applied.contains(&m.version)).count();
        Ok(if missing == 0 { SchemaState::Current } else { SchemaState::Behind(missing) })
    }
}

/// Prepared statements on a new connection are somebody else's: its server has served others. There may be none yet.
async fn has_a_past(connection: &mut PgConnection) -> Result<bool> {
    Ok(sqlx::raw_sql("SELECT FROM pg_prepared_statements LIMIT 1").fetch_optional(connection).await?.is_some())
}

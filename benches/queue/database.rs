//! The server's databases: one preloaded per schema and size, and a fresh copy of it for each run.

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};

use crate::Outcome;
use crate::child::Child;
use crate::contenders::Contender;
use crate::load::Load;

pub struct Server {
    /// As its superuser.
    url: url::Url,
}

impl Server {
    pub fn from_environment() -> Outcome<Self> {
        let url = std::env::var("DATABASE_URL").map_err(|_| "DATABASE_URL: not set; run make bench")?;
        Ok(Self { url: url.parse()? })
    }

    pub async fn connect(&self, database: &str) -> Outcome<PgConnection> {
        let options: PgConnectOptions = self.url(database).parse()?;
        Ok(options.disable_statement_logging().connect().await?)
    }

    /// As every driver understands it.
    pub fn url(&self, database: &str) -> String {
        let mut url = self.url.clone();
        url.set_path(database);
        url.into()
    }

    async fn admin(&self, statements: &[String]) -> Outcome<()> {
        let mut connection = self.connect("postgres").await?;
        for statement in statements {
            sqlx::raw_sql(AssertSqlSafe(statement.clone())).execute(&mut connection).await?;
        }
        Ok(connection.close().await?)
    }

    /// A fresh database for one run of this contender: a copy of the preloaded one, which is made when first asked for.
    pub async fn fresh(&self, contender: &Contender, load: Load) -> Outcome<String> {
        let template = format!("{}_{}", contender.schema, load.name());
        let known: Option<(i32,)> = sqlx::query_as("SELECT 1 FROM pg_database WHERE datname = $1")
            .bind(&template)
            .fetch_optional(&mut self.connect("postgres").await?)
            .await?;
        if known.is_none() {
            self.preload(contender, load, &template).await?;
        }
        let run = format!("run_{}", contender.schema);
        self.drop(&run).await?;
        // Both write checkpoints, so that every run starts with clean buffers.
        let copy = format!("CREATE DATABASE {run} TEMPLATE {template} STRATEGY FILE_COPY");
        self.admin(&[copy, "CHECKPOINT".to_owned()]).await?;
        Ok(run)
    }

    /// A database that only one run uses, so it needs no copy.
    pub async fn once(&self, contender: &Contender, load: Load) -> Outcome<String> {
        let run = format!("once_{}_{}", contender.schema, load.name());
        self.drop(&run).await?;
        self.preload(contender, load, &run).await?;
        self.admin(&["CHECKPOINT".to_owned()]).await?;
        Ok(run)
    }

    pub async fn drop(&self, database: &str) -> Outcome<()> {
        self.admin(&[format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)")]).await
    }

    async fn preload(&self, contender: &Contender, load: Load, template: &str) -> Outcome<()> {
        let new = format!("{template}_new");
        self.drop(&new).await?;
        self.admin(&[format!("CREATE DATABASE {new}")]).await?;
        let url = self.url(&new);
        Child::start(contender, &["setup"], &url)?.finished()?;
        let mut connection = self.connect(&new).await?;
        match (load, contender.schema) {
            (_, "ours") => load.insert(&mut connection).await?,
            (Load::Empty, _) => {}
            _ => Child::start(contender, &["preload", &load.jobs().to_string()], &url)?.finished()?,
        }
        sqlx::raw_sql("VACUUM (ANALYZE)").execute(&mut connection).await?;
        connection.close().await?;
        self.admin(&[format!("ALTER DATABASE {new} RENAME TO {template}")]).await
    }
}

/// As many as the schema has had from its beginning.
const CHECKS: i64 = 14;

/// Whether the promise is the product's: every table logged, every CHECK in force, nothing set to a weaker commit, and
/// every job once succeeded under the benchmark's lease, at its first attempt (at its second, if it was to fail first).
pub async fn assert_kept(connection: &mut PgConnection, jobs: u64, lease_seconds: u64) -> Outcome<()> {
    let one = async |connection: &mut PgConnection, sql: &'static str| -> Outcome<i64> {
        Ok(sqlx::query_as::<_, (i64,)>(sql).fetch_one(connection).await?.0)
    };
    let unlogged = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
        WHERE n.nspname = 'public' AND c.relkind IN ('r', 'p', 'i', 'm') AND c.relpersistence <> 'p'";
    // Some are the table's, some those of its columns' types.
    let checks = "SELECT count(*) FROM pg_constraint WHERE contype = 'c' AND convalidated AND (conrelid = 'jobs'::regclass \
        OR contypid IN (SELECT atttypid FROM pg_attribute WHERE attrelid = 'jobs'::regclass))";
    let weaker = "SELECT count(*) FROM pg_settings WHERE (name, setting) IN \
        (('synchronous_commit', 'off'), ('synchronous_commit', 'local'), ('fsync', 'off'), ('full_page_writes', 'off'))";
    let set_elsewhere =
        "SELECT count(*) FROM pg_db_role_setting WHERE array_to_string(setconfig, ',') ~ 'synchronous_commit'";
    for (what, sql) in [("unlogged tables", unlogged), ("weak settings", weaker), ("weak defaults", set_elsewhere)] {
        let found = one(connection, sql).await?;
        if found != 0 {
            return Err(format!("{found} {what}").into());
        }
    }
    if one(connection, checks).await? < CHECKS {
        return Err("CHECKs are missing".into());
    }
    let (all, kept): (i64, i64) = sqlx::query_as(
        "SELECT count(*), count(*) FILTER (WHERE status = 'succeeded' AND finished_at IS NOT NULL \
             AND attempts = 1 + (payload @> '{\"fail_first\": true}')::int AND claim_token IS NOT NULL AND lease_seconds = $1) FROM jobs",
    )
    .bind(i32::try_from(lease_seconds)?)
    .fetch_one(connection)
    .await?;
    let jobs = i64::try_from(jobs)?;
    if (all, kept) != (jobs, jobs) {
        return Err(format!("of {jobs} jobs {all} are there and {kept} succeeded once, at the first attempt").into());
    }
    Ok(())
}

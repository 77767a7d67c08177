//! The settings by group, and the typed values the programs get.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use clap::Args;
use sqlx::postgres::PgConnectOptions;

use super::executors::ExecutorArgs;
use super::values::{self, LogFormat, Secret};
use crate::job::RetryPolicy;
use crate::kinds::Registry;
use crate::{controller, queue, worker};

/// What `jobrequest worker` runs with.
pub struct WorkerSettings {
    pub log: LogSettings,
    pub http_addr: SocketAddr,
    pub database: Database,
    pub queue: queue::Settings,
    pub worker: worker::Settings,
    pub registry: Registry,
}

/// What `jobrequest controller` runs with.
pub struct ControllerSettings {
    pub log: LogSettings,
    pub http_addr: SocketAddr,
    pub database: Database,
    pub queue: queue::Settings,
    pub controller: controller::Settings,
}

/// What `jobrequest migrate` runs with.
pub struct MigrateSettings {
    pub log: LogSettings,
    pub database: Box<Database>,
}

/// Where the queue is.
pub struct Database {
    pub pooled: PgConnectOptions,
    /// Reaches Postgres itself, for LISTEN and migrations; the same as `pooled` if there is no pooler.
    pub direct: PgConnectOptions,
    /// A direct URL of its own was given: the other one leads to a transaction pooler.
    pub has_pooler: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    pub filter: String,
    pub format: LogFormat,
}

#[derive(Args)]
pub(super) struct LogArgs {
    /// What is logged, to stderr: a level (off, error, warn, info, debug, trace), or target=level, by commas
    #[arg(long, env = "JOBREQUEST_LOG", hide_env_values = true, help_heading = "Log", value_name = "FILTER")]
    #[arg(default_value = "info")]
    log: String,
    /// How log lines look
    #[arg(long, env = "JOBREQUEST_LOG_FORMAT", hide_env_values = true, help_heading = "Log", value_name = "FORMAT")]
    #[arg(default_value = "text")]
    log_format: LogFormat,
}

#[derive(Args)]
#[command(next_help_heading = "Database")]
pub(super) struct DatabaseArgs {
    /// Postgres: postgres://user:password@host:5432/database. Required
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<Secret>,
    /// Postgres itself, for LISTEN and migrations, when the first URL leads to a transaction pooler (PgBouncer). Without
    /// it the first URL is taken for Postgres itself, and a pooler's mixed-up statements fail
    #[arg(long, env = "JOBREQUEST_DATABASE_DIRECT_URL", hide_env_values = true, value_name = "URL")]
    database_direct_url: Option<Secret>,
}

#[derive(Args)]
#[command(next_help_heading = "Queue: the same for all programs of an install")]
pub(super) struct QueueArgs {
    /// Whose rows and keys these are when several installs share a database
    #[arg(long, env = "JOBREQUEST_INSTALL", hide_env_values = true, value_name = "NAME")]
    #[arg(default_value = "default", value_parser = values::install)]
    pub(super) install: String,
    /// How long a claim holds without a heartbeat; a dead worker's jobs wait this long and a third more
    #[arg(long, env = "JOBREQUEST_LEASE_SECONDS", hide_env_values = true, value_name = "SECONDS")]
    #[arg(default_value = "30", value_parser = values::lease)]
    lease_seconds: Duration,
    /// The shortest wait before another attempt
    #[arg(long, env = "JOBREQUEST_RETRY_BASE_SECONDS", hide_env_values = true, value_name = "SECONDS")]
    #[arg(default_value = "1", value_parser = values::back_off)]
    retry_base_seconds: Duration,
    /// The longest wait before another attempt
    #[arg(long, env = "JOBREQUEST_RETRY_CAP_SECONDS", hide_env_values = true, value_name = "SECONDS")]
    #[arg(default_value = "60", value_parser = values::back_off)]
    retry_cap_seconds: Duration,
    /// How long rows of ended jobs are kept
    #[arg(long, env = "JOBREQUEST_RETENTION_SECONDS", hide_env_values = true, value_name = "SECONDS")]
    #[arg(default_value = "604800", value_parser = values::retention)]
    retention_seconds: Duration,
    /// How long a succeeded job's idempotency key is kept; 0 for ever
    #[arg(long, env = "JOBREQUEST_KEY_RETENTION_SECONDS", hide_env_values = true, value_name = "SECONDS")]
    #[arg(default_value = "0", value_parser = values::retention)]
    key_retention_seconds: Duration,
}

#[derive(Args)]
pub(super) struct WorkerArgs {
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    queue: QueueArgs,
    #[command(flatten)]
    worker: PoolArgs,
    #[command(flatten)]
    executors: ExecutorArgs,
    #[command(flatten)]
    http: HttpArgs,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Args)]
#[command(next_help_heading = "Worker")]
struct PoolArgs {
    /// How many jobs run at once; each kind keeps a few of these slots from the others
    #[arg(long, env = "JOBREQUEST_CONCURRENCY", hide_env_values = true, value_name = "JOBS")]
    #[arg(default_value = "32", value_parser = values::slots)]
    concurrency: usize,
    /// Run these kinds only, by commas; all kinds if unset
    #[arg(long, env = "JOBREQUEST_KINDS", hide_env_values = true, value_name = "KINDS", default_value = "")]
    #[arg(hide_default_value = true)]
    kinds: String,
    /// The longest wait before an idle worker looks for due jobs unasked
    #[arg(long, env = "JOBREQUEST_POLL_SECONDS", hide_env_values = true, value_name = "SECONDS")]
    #[arg(default_value = "2", value_parser = values::poll)]
    poll_seconds: Duration,
    /// How long a shutdown may take; what has not ended a little before that is stopped and handed back, and what can't
    /// be taken back any more has 10 seconds more
    #[arg(long, env = "JOBREQUEST_SHUTDOWN_GRACE_SECONDS", hide_env_values = true, value_name = "SECONDS")]
    #[arg(default_value = "30", value_parser = values::grace)]
    shutdown_grace_seconds: Duration,
}

#[derive(Args)]
#[command(next_help_heading = "HTTP")]
struct HttpArgs {
    /// Where /metrics, /healthz and /readyz are: address:port, or :port. The controller's default port is 8080, the
    /// worker's 8081
    #[arg(long, env = "JOBREQUEST_HTTP_ADDR", hide_env_values = true, value_name = "ADDRESS")]
    #[arg(value_parser = values::address)]
    http_addr: Option<SocketAddr>,
}

#[derive(Args)]
pub(super) struct ControllerArgs {
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    queue: QueueArgs,
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    http: HttpArgs,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Args)]
#[command(next_help_heading = "Controller")]
struct WatchArgs {
    /// The namespaces to work for, by commas; all if unset
    #[arg(long, env = "JOBREQUEST_WATCH_NAMESPACES", hide_env_values = true, value_name = "NAMES")]
    #[arg(default_value = "", hide_default_value = true)]
    watch_namespaces: String,
    /// When to delete an ended JobRequest that has no ttlSecondsAfterFinished; never if unset
    #[arg(long, env = "JOBREQUEST_DEFAULT_TTL_SECONDS", hide_env_values = true, value_name = "SECONDS")]
    #[arg(value_parser = values::retention)]
    default_ttl_seconds: Option<Duration>,
    /// How many JobRequests are worked on at once
    #[arg(long, env = "JOBREQUEST_RECONCILE_CONCURRENCY", hide_env_values = true, value_name = "NUMBER")]
    #[arg(default_value = "16", value_parser = values::reconciles)]
    reconcile_concurrency: u16,
    /// How long to hold back before more than half of over 100 live jobs are cancelled because their JobRequests are gone
    #[arg(long, env = "JOBREQUEST_ORPHAN_WAIT_SECONDS", hide_env_values = true, value_name = "SECONDS")]
    #[arg(default_value = "600", value_parser = values::retention)]
    orphan_wait_seconds: Duration,
    /// Take over the rows and keys of another cluster, of this uid: what a controller that finds the install taken names
    #[arg(long, env = "JOBREQUEST_ADOPT_INSTALL", hide_env_values = true, value_name = "UID")]
    #[arg(value_parser = values::uid)]
    adopt_install: Option<String>,
}

#[derive(Args)]
pub(super) struct MigrateArgs {
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    log: LogArgs,
}

/// An error in a setting that no single value's parser can see.
pub(super) fn named(variable: &str, flag: &str) -> impl Fn(String) -> String {
    move |problem| format!("{variable} ({flag}): {problem}")
}

impl LogArgs {
    pub(super) fn settings(self) -> Result<LogSettings, String> {
        let Self { log, log_format } = self;
        let filter = values::log_filter(&log).map_err(named("JOBREQUEST_LOG", "--log"))?;
        Ok(LogSettings { filter, format: log_format })
    }
}

impl DatabaseArgs {
    pub(super) fn settings(self) -> Result<Database, String> {
        let Self { database_url, database_direct_url } = self;
        let Some(Secret(url)) = database_url else {
            return Err("DATABASE_URL is not set: postgres://user:password@host:5432/database".to_owned());
        };
        let pooled = values::database(&url).map_err(|why| format!("DATABASE_URL (--database-url) {why}"))?;
        let has_pooler = database_direct_url.as_ref().is_some_and(|Secret(direct)| *direct != url);
        let direct = match database_direct_url {
            Some(Secret(url)) => values::database(&url)
                .map_err(|why| format!("JOBREQUEST_DATABASE_DIRECT_URL (--database-direct-url) {why}"))?,
            None => pooled.clone(),
        };
        let name = |options: PgConnectOptions| match options.get_application_name() {
            Some(_) => options,
            None => options.application_name("jobrequest"),
        };
        Ok(Database { pooled: name(pooled), direct: name(direct), has_pooler })
    }
}

impl QueueArgs {
    fn settings(self, database: &Database) -> queue::Settings {
        let Self {
            install,
            lease_seconds,
            retry_base_seconds,
            retry_cap_seconds,
            retention_seconds,
            key_retention_seconds,
        } = self;
        queue::Settings {
            install,
            lease: lease_seconds,
            retry: RetryPolicy::new(retry_base_seconds, retry_cap_seconds),
            retention: retention_seconds,
            key_retention: Some(key_retention_seconds).filter(|time| !time.is_zero()),
            transaction_pooler: database.has_pooler,
            ..queue::Settings::default()
        }
    }
}

impl HttpArgs {
    fn address(self, default_port: u16) -> SocketAddr {
        self.http_addr.unwrap_or((Ipv4Addr::UNSPECIFIED, default_port).into())
    }
}

impl WorkerArgs {
    pub(super) fn settings(self) -> Result<WorkerSettings, String> {
        let Self { database, queue, worker, executors, http, log } = self;
        let PoolArgs { concurrency, kinds, poll_seconds, shutdown_grace_seconds } = worker;
        let (database, registry) = (database.settings()?, executors.registry()?);
        let kinds = values::names(&kinds);
        worker::check_kinds(&registry, &kinds)
            .map_err(|error| named("JOBREQUEST_KINDS", "--kinds")(error.to_string()))?;
        Ok(WorkerSettings {
            log: log.settings()?,
            http_addr: http.address(8081),
            queue: queue.settings(&database),
            database,
            worker: worker::Settings {
                concurrency,
                poll: poll_seconds,
                shutdown_grace: shutdown_grace_seconds,
                kinds,
                name: process_name(),
                ..worker::Settings::default()
            },
            registry,
        })
    }
}

impl ControllerArgs {
    pub(super) fn settings(self) -> Result<ControllerSettings, String> {
        let Self { database, queue, watch, http, log } = self;
        let WatchArgs {
            watch_namespaces,
            default_ttl_seconds,
            reconcile_concurrency,
            orphan_wait_seconds,
            adopt_install,
        } = watch;
        let watch_namespaces = values::names(&watch_namespaces);
        if let Some(bad) = watch_namespaces.iter().find(|name| !values::is_label(name)) {
            let problem = format!("`{}` is not a namespace's name", crate::text::cut(bad, 64));
            return Err(named("JOBREQUEST_WATCH_NAMESPACES", "--watch-namespaces")(problem));
        }
        let database = database.settings()?;
        let queue = queue.settings(&database);
        Ok(ControllerSettings {
            log: log.settings()?,
            http_addr: http.address(8080),
            database,
            controller: controller::Settings {
                name: process_name(),
                watch_namespaces,
                default_ttl: default_ttl_seconds,
                lease: queue.lease,
                concurrency: reconcile_concurrency,
                orphan_wait: orphan_wait_seconds,
                adopt_install,
            },
            queue,
        })
    }
}

impl MigrateArgs {
    pub(super) fn settings(self) -> Result<MigrateSettings, String> {
        let Self { database, log } = self;
        Ok(MigrateSettings { log: log.settings()?, database: Box::new(database.settings()?) })
    }
}

/// The host's name, which is the Pod's in Kubernetes; elsewhere with the process's number, since there may be several.
fn process_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let host = if host.is_empty() { "worker" } else { host };
    match std::process::id() {
        1 => host.to_owned(),
        id => format!("{host}-{id}"),
    }
}

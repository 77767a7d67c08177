//! The program: parse, start the log, run what was asked for.
//!
//! Exit codes: 0 done or drained; 1 failed, the reason is the last line of stderr; 2 a setting or argument that can't
//! be used; 130 ended at once by a second signal.

use std::future::Future;
use std::process::ExitCode;
use std::time::Duration;

use jobrequest::admin::{Health, Metrics};
use jobrequest::cli::{self, ControllerSettings, MigrateSettings, Program, Refusal, WorkerSettings};
use jobrequest::kinds::{KindSettings, Registry};
use jobrequest::queue::{self, Queue, SchemaState};
use jobrequest::worker::Worker;
use jobrequest::{api, check, controller, telemetry};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

const FAILED: u8 = 1;
const WRONG_SETTINGS: u8 = 2;
const AT_ONCE: i32 = 130;

/// How often a program that waits for its database looks again.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// How long `migrate` waits for the database.
const MIGRATE_WAIT: Duration = Duration::from_secs(300);

/// Why a program failed, in one line.
type Failed = String;

fn main() -> ExitCode {
    // Before anything opens a TLS connection: kube and reqwest must agree on one provider. It fails only when one
    // is installed already.
    _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let program = match cli::parse() {
        Ok(program) => program,
        Err(Refusal::Asked(text)) => {
            print(&text);
            return ExitCode::SUCCESS;
        }
        Err(Refusal::Wrong(line)) => {
            eprintln!("jobrequest: {line}");
            return ExitCode::from(WRONG_SETTINGS);
        }
    };
    let outcome = match program {
        Program::Crd => {
            print(&api::crd_yaml());
            Ok(())
        }
        Program::Jobs(jobs) => run(jobs.run()),
        Program::Check(check) => run(async { check::run(check).await.map(|line| print(&format!("{line}\n"))) }),
        Program::Migrate(MigrateSettings { log, database }) => {
            telemetry::init(&log);
            run(migrate(*database))
        }
        Program::Worker(settings) => {
            telemetry::init(&settings.log);
            run(work(*settings))
        }
        Program::Controller(settings) => {
            telemetry::init(&settings.log);
            run(control(*settings))
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(line) => {
            eprintln!("jobrequest: {line}");
            ExitCode::from(FAILED)
        }
    }
}

/// On a runtime that does not wait for blocking work when the program is done.
fn run(program: impl Future<Output = Result<(), Failed>>) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("can't start the runtime: {error}"))?;
    let outcome = runtime.block_on(program);
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

async fn work(settings: WorkerSettings) -> Result<(), Failed> {
    let WorkerSettings { log: _, http_addr, database, queue, worker, registry } = settings;
    let (health, metrics) = (Health::new(), Metrics::new(registry.kinds()));
    let queue = Queue::new(database.pooled, queue);
    let builder = Worker::builder(queue.clone(), registry).settings(worker).listen(database.direct);
    let worker = builder.health(health.clone()).metrics(metrics.clone()).build().map_err(|error| error.to_string())?;
    serve(http_addr, health, metrics, |health, shutdown| async move {
        if wait_for_database(&queue, &health, &shutdown).await {
            worker.run(shutdown).await;
        }
        Ok(())
    })
    .await
}

async fn control(settings: ControllerSettings) -> Result<(), Failed> {
    let ControllerSettings { log: _, http_addr, database, queue, controller } = settings;
    let builtin = Registry::builtin(&KindSettings::default()).map_err(|error| error.to_string())?;
    let metrics = Metrics::new(builtin.kinds());
    let queue = Queue::new(database.pooled, queue);
    serve(http_addr, Health::new(), metrics.clone(), |health, shutdown| async move {
        // It waits for the database by itself, and resources that wait with it say so.
        let ran = controller::run(controller, queue, database.direct, health, metrics, shutdown).await;
        ran.map_err(|error| error.to_string())
    })
    .await
}

/// Runs a program beside its HTTP server, which answers to the last. The first signal asks the program to end.
async fn serve<F: Future<Output = Result<(), Failed>>>(
    addr: std::net::SocketAddr,
    health: Health,
    metrics: Metrics,
    program: impl FnOnce(Health, CancellationToken) -> F,
) -> Result<(), Failed> {
    let (shutdown, served) = (CancellationToken::new(), CancellationToken::new());
    end_on_signals(shutdown.clone())?;
    let mut server = tokio::spawn(jobrequest::admin::serve(addr, health.clone(), metrics, served.clone()));
    let outcome = tokio::select! {
        outcome = program(health, shutdown) => outcome,
        ended = &mut server => return Err(match ended {
            Ok(Err(error)) => error.to_string(),
            Ok(Ok(())) | Err(_) => "the HTTP server ended by itself".to_owned(),
        }),
    };
    served.cancel();
    _ = server.await;
    outcome
}

fn end_on_signals(shutdown: CancellationToken) -> Result<(), Failed> {
    let listen = |kind| signal(kind).map_err(|error| format!("can't listen for signals: {error}"));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    tokio::spawn(async move {
        for signals in 1.. {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if signals > 1 {
                tracing::warn!(signal = name, "ending at once: the rescue takes what was under way");
                std::process::exit(AT_ONCE);
            }
            tracing::info!(signal = name, "ending; a second signal ends at once");
            shutdown.cancel();
        }
    });
    Ok(())
}

/// For a worker: waits until the database answers and holds this version's schema; false if the shutdown came first. What it waits
/// for is said once by the parts, in the log and in /readyz.
async fn wait_for_database(queue: &Queue, health: &Health, shutdown: &CancellationToken) -> bool {
    let (postgres, schema) = (health.part("postgres"), health.part("schema"));
    loop {
        match shutdown.run_until_cancelled(queue.schema_state()).await {
            None => return false,
            Some(Err(error)) => postgres.not_ready(error.to_string()),
            Some(Ok(state)) => {
                postgres.ready();
                match state {
                    SchemaState::Current => {
                        schema.ready();
                        return true;
                    }
                    SchemaState::Behind(missing) => {
                        schema.not_ready(format!("{missing} migrations are missing: run jobrequest migrate"));
                    }
                }
            }
        }
        if shutdown.run_until_cancelled(sleep(LOOK_AGAIN)).await.is_none() {
            return false;
        }
    }
}

async fn migrate(database: cli::Database) -> Result<(), Failed> {
    let give_up = Instant::now() + MIGRATE_WAIT;
    let mut said = String::new();
    loop {
        match queue::migrate(&database.direct).await {
            Ok(()) => {
                tracing::info!("the database has this version's schema");
                return Ok(());
            }
            Err(error) if error.is_passing() && Instant::now() < give_up => {
                let why = error.to_string();
                if why != said {
                    tracing::warn!(error = why, "waiting for the database");
                    said = why;
                }
            }
            Err(error) => return Err(format!("not migrated: {error}")),
        }
        sleep(LOOK_AGAIN).await;
    }
}

/// To stdout. Whoever closes it early has read enough.
fn print(text: &str) {
    use std::io::Write;
    _ = std::io::stdout().write_all(text.as_bytes());
}

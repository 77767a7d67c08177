//! `jobrequest jobs`: what a person does on the database, when the resource's own commands are not at hand.

use std::io::{self, Write};

use chrono::SecondsFormat;
use clap::Subcommand;
use uuid::Uuid;

use super::executors::webhook_masters;
use super::settings::{Database, DatabaseArgs};
use super::values::{self, Secret};
use crate::job::{Job, Status};
use crate::kinds::webhook::WebhookMasters;
use crate::queue::{CancelOutcome, ListFilter, Page, Queue, RetryOutcome, Settings};

/// A job command, ready to run.
pub enum Jobs {
    OnDatabase { database: Box<Database>, install: String, action: Action },
    WebhookSecret { masters: WebhookMasters, namespace: Option<String>, url: url::Url },
}

/// What to do with the jobs of an install.
pub enum Action {
    List { filter: ListFilter, output: Output },
    Get { id: Uuid, output: Output },
    Retry { id: Uuid, output: Option<Output> },
    Cancel { id: Uuid, output: Option<Output> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people
    Table,
    Json,
    Yaml,
}

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Args)]
struct Place {
    #[command(flatten)]
    database: DatabaseArgs,
    /// Whose jobs
    #[arg(long, env = "JOBREQUEST_INSTALL", hide_env_values = true, value_name = "NAME")]
    #[arg(default_value = "default", value_parser = values::install)]
    install: String,
}

#[derive(Subcommand)]
enum Command {
    /// List jobs, newest first
    List {
        #[command(flatten)]
        place: Place,
        /// Only in this state: queued, running, retrying, succeeded, failed_permanent or cancelled
        #[arg(long, value_parser = status)]
        status: Option<Status>,
        /// Only of this kind
        #[arg(long)]
        kind: Option<String>,
        /// Only of this namespace
        #[arg(long, short)]
        namespace: Option<String>,
        /// At most so many, 1 to 200
        #[arg(long, default_value = "50", value_parser = limit)]
        limit: i64,
        /// Pass over so many
        #[arg(long, default_value = "0", value_parser = offset)]
        offset: i64,
        #[arg(long, short, default_value = "table")]
        output: Output,
    },
    /// Show one job
    Get {
        #[command(flatten)]
        place: Place,
        #[arg(value_parser = job_id)]
        id: Uuid,
        #[arg(long, short, default_value = "yaml")]
        output: Output,
    },
    /// Run a failed or cancelled job again
    Retry {
        #[command(flatten)]
        place: Place,
        #[arg(value_parser = job_id)]
        id: Uuid,
        /// Show the job as it is then, instead of a line that says what came of it
        #[arg(long, short)]
        output: Option<Output>,
    },
    /// Cancel a job: a waiting one at once, a running one at its next safe point
    Cancel {
        #[command(flatten)]
        place: Place,
        #[arg(value_parser = job_id)]
        id: Uuid,
        /// Show the job as it is then, instead of a line that says what came of it
        #[arg(long, short)]
        output: Option<Output>,
    },
    /// Print the secret with which a receiver verifies webhooks; the newest first while the master changes
    WebhookSecret {
        /// The namespace of the JobRequests; none for jobs enqueued in SQL
        #[arg(long, short)]
        namespace: Option<String>,
        /// The receiver's URL; its scheme, host and port count
        url: String,
        /// As the workers have it
        #[arg(long, env = "JOBREQUEST_WEBHOOK_SECRET", hide_env_values = true, value_name = "SECRET")]
        webhook_secret: Option<Secret>,
    },
}

fn job_id(text: &str) -> Result<Uuid, String> {
    text.parse().map_err(|_| "is not a job's id, such as 01930e3c-7b1f-7a52-9d0e-3f6f4b0c2a11".to_owned())
}

fn status(text: &str) -> Result<Status, String> {
    text.parse().map_err(|_| format!("is none of: {}", Status::ALL.map(Status::as_str).join(", ")))
}

fn limit(text: &str) -> Result<i64, String> {
    values::whole(text, 1, 200).map(|limit| i64::try_from(limit).unwrap_or(200))
}

fn offset(text: &str) -> Result<i64, String> {
    values::whole(text, 0, 1_000_000_000).map(|offset| i64::try_from(offset).unwrap_or(0))
}

impl Args {
    pub(super) fn settings(self) -> Result<Jobs, String> {
        let on_database = |place: Place, action| {
            let Place { database, install } = place;
            let database = Box::new(database.settings()?);
            Ok(Jobs::OnDatabase { database, install, action })
        };
        match self.command {
            Command::List { place, status, kind, namespace, limit, offset, output } => {
                let filter = ListFilter { status, kind, namespace, limit: Some(limit), offset };
                on_database(place, Action::List { filter, output })
            }
            Command::Get { place, id, output } => on_database(place, Action::Get { id, output }),
            Command::Retry { place, id, output } => on_database(place, Action::Retry { id, output }),
            Command::Cancel { place, id, output } => on_database(place, Action::Cancel { id, output }),
            Command::WebhookSecret { namespace, url, webhook_secret } => {
                let Some(Secret(text)) = webhook_secret else {
                    return Err("JOBREQUEST_WEBHOOK_SECRET is not set: webhooks go unsigned".to_owned());
                };
                if let Some(bad) = namespace.as_deref().filter(|name| !values::is_label(name)) {
                    return Err(format!("--namespace: `{}` is not a namespace's name", crate::text::cut(bad, 64)));
                }
                let url = url::Url::parse(&url)
                    .ok()
                    .filter(|url| matches!(url.scheme(), "http" | "https"))
                    .ok_or("<URL> is not an http or https URL")?;
                Ok(Jobs::WebhookSecret { masters: webhook_masters(&text)?, namespace, url })
            }
        }
    }
}

impl Jobs {
    /// Does it and prints what came of it.
    ///
    /// # Errors
    /// One line: no such job, a state from which it can't be done, a database that does not answer. For a list a line
    /// for each job that can't be read, once the others are printed.
    pub async fn run(self) -> Result<(), String> {
        let (text, unreadable) = match self {
            Self::WebhookSecret { masters, namespace, url } => {
                let secrets = masters.secrets(namespace.as_deref(), &url);
                (secrets.iter().map(|secret| format!("{secret}\n")).collect(), Vec::new())
            }
            Self::OnDatabase { database, install, action } => {
                let Database { pooled, direct: _, has_pooler } = *database;
                let settings =
                    Settings { install, max_connections: 2, transaction_pooler: has_pooler, ..Settings::default() };
                let queue = Queue::new(pooled, settings);
                act(&queue, action).await?
            }
        };
        match io::stdout().write_all(text.as_bytes()) {
            // Whoever reads has seen enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            written => written.map_err(|error| format!("can't write: {error}"))?,
        }
        if unreadable.is_empty() { Ok(()) } else { Err(unreadable.join("\njobrequest: ")) }
    }
}

/// What to print, and the jobs that can't be read.
async fn act(queue: &Queue, action: Action) -> Result<(String, Vec<String>), String> {
    let text = match action {
        Action::List { filter, output } => {
            let Page { jobs, unreadable } = queue.list_page(&filter).await.map_err(|error| error.to_string())?;
            let text = print(&jobs, output, || table(&jobs))?;
            return Ok((text, unreadable.iter().map(ToString::to_string).collect()));
        }
        Action::Get { id, output } => show(queue, id, output).await,
        Action::Retry { id, output } => {
            // The operation itself knows no install: a job of another one is not ours to touch.
            queue.get(id).await.map_err(|error| format!("{id}: {error}"))?;
            match queue.retry_by_hand(id).await.map_err(|error| format!("{id}: {error}"))? {
                RetryOutcome::Queued | RetryOutcome::AlreadyUsed => {}
                RetryOutcome::KeyTaken => return Err(format!("{id}: another job has taken its idempotency key")),
            }
            match output {
                Some(output) => show(queue, id, output).await,
                None => Ok(format!("job {id} queued\n")),
            }
        }
        Action::Cancel { id, output } => {
            queue.get(id).await.map_err(|error| format!("{id}: {error}"))?;
            let what = match queue.request_cancel(id).await.map_err(|error| format!("{id}: {error}"))? {
                CancelOutcome::CancelledNow => "cancelled",
                CancelOutcome::PendingOnWorker => "is running and was told to stop",
                CancelOutcome::AlreadyTerminal => "had ended",
            };
            match output {
                Some(output) => show(queue, id, output).await,
                None => Ok(format!("job {id} {what}\n")),
            }
        }
    }?;
    Ok((text, Vec::new()))
}

async fn show(queue: &Queue, id: Uuid, output: Output) -> Result<String, String> {
    let job = queue.get(id).await.map_err(|error| format!("{id}: {error}"))?;
    print(&job, output, || table(std::slice::from_ref(&job)))
}

fn print(value: &impl serde::Serialize, output: Output, table: impl FnOnce() -> String) -> Result<String, String> {
    match output {
        Output::Table => Ok(table()),
        Output::Json => serde_json::to_string_pretty(value).map(|text| text + "\n").map_err(|error| error.to_string()),
        Output::Yaml => serde_yaml::to_string(value).map_err(|error| error.to_string()),
    }
}

fn table(jobs: &[Job]) -> String {
    let head = ["ID", "KIND", "STATUS", "ATTEMPTS", "NAMESPACE", "RUN-AT", "LAST-ERROR"].map(str::to_owned);
    let rows = jobs.iter().map(|job| {
        let error: String = job.last_error.as_deref().unwrap_or_default().chars().take(60).collect();
        [
            job.id.to_string(),
            job.kind.clone(),
            job.state.status().to_string(),
            format!("{}/{}", job.attempts, job.max_attempts),
            job.namespace.clone().unwrap_or_else(|| "-".to_owned()),
            job.run_at.to_rfc3339_opts(SecondsFormat::Secs, true),
            // What a server said may hold control characters, and a terminal obeys them.
            error.chars().map(|c| if c.is_control() { ' ' } else { c }).collect(),
        ]
    });
    let rows: Vec<[String; 7]> = std::iter::once(head).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..7).map(width).collect();
    let line = |row: &[String; 7]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

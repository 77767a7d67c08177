//! The command line: every setting there is, as a flag and as an environment variable of the same meaning. Nothing else
//! reads the environment (the Postgres client's `PG*` and kube's kubeconfig aside).
//!
//! What comes out is typed and checked: a program that starts has settings it can use. What can't be used is said in
//! one line, which never holds a secret. An empty variable counts as unset; an unknown `JOBREQUEST_…` one stops the
//! start, since it is a typing error or another version's.

mod environment;
mod executors;
pub mod jobs;
mod settings;
mod values;

use std::ffi::OsString;
use std::time::Duration;

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::check::Check;

pub use settings::{ControllerSettings, Database, LogSettings, MigrateSettings, WorkerSettings};
pub use values::LogFormat;

/// What the command line asks for.
pub enum Program {
    Controller(Box<ControllerSettings>),
    Worker(Box<WorkerSettings>),
    Migrate(MigrateSettings),
    Crd,
    Jobs(jobs::Jobs),
    Check(Check),
}

/// Why nothing is run: what to print, and where.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Help or the version were asked for: to stdout, and all is well.
    Asked(String),
    /// One line for stderr.
    Wrong(String),
}

#[derive(Parser)]
#[command(
    name = "jobrequest",
    version,
    about = "Background jobs as Kubernetes resources, run from one Postgres queue",
    after_help = "Exit codes: 0 done; 1 failed, the reason is the last line of stderr; 2 a setting or argument that \
                  can't be used; 130 ended at once by a second signal.",
    propagate_version = true,
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Watch JobRequests: put them into the queue, show how they do, cancel what is deleted
    Controller(settings::ControllerArgs),
    /// Run jobs from the queue
    Worker(Box<settings::WorkerArgs>),
    /// Bring the database's tables up to this version; waits for the database up to 5 minutes
    Migrate(settings::MigrateArgs),
    /// Print the CustomResourceDefinition
    Crd,
    /// Look at jobs in the database and act on them
    Jobs(jobs::Args),
    /// Run one small job through API server, controller, database and worker, and delete it
    Check {
        /// Where; by default the namespace of the kubeconfig's context, or the Pod's own
        #[arg(long, short)]
        namespace: Option<String>,
        /// How long all of it may take, in seconds
        #[arg(long, default_value = "60", value_parser = values::timeout)]
        timeout_seconds: Duration,
    },
}

/// Parses the process's arguments and environment.
///
/// # Errors
/// [`Refusal`]: help, or the one thing that is wrong.
pub fn parse() -> Result<Program, Refusal> {
    let variables: Vec<OsString> = std::env::vars_os().map(|(name, _)| name).collect();
    parse_from(std::env::args_os(), &variables)
}

fn parse_from(arguments: impl IntoIterator<Item = OsString>, variables: &[OsString]) -> Result<Program, Refusal> {
    let known = environment::known_to(&Cli::command());
    let command = without_empty_variables(Cli::command());
    let matches = command.try_get_matches_from(arguments).map_err(|error| refuse(&error))?;
    environment::check(variables, &known).map_err(Refusal::Wrong)?;
    let Cli { command } = Cli::from_arg_matches(&matches).map_err(|error| refuse(&error))?;
    match command {
        Command::Controller(args) => args.settings().map(|settings| Program::Controller(Box::new(settings))),
        Command::Worker(args) => args.settings().map(|settings| Program::Worker(Box::new(settings))),
        Command::Migrate(args) => args.settings().map(Program::Migrate),
        Command::Crd => Ok(Program::Crd),
        Command::Jobs(args) => args.settings().map(Program::Jobs),
        Command::Check { namespace: Some(name), .. } if !values::is_label(&name) => {
            Err(format!("--namespace: `{}` is not a namespace's name", crate::text::cut(&name, 64)))
        }
        Command::Check { namespace, timeout_seconds } => {
            Ok(Program::Check(Check { namespace, timeout: timeout_seconds }))
        }
    }
    .map_err(Refusal::Wrong)
}

/// A manifest that leaves a value empty means the default.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let empty = arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
        if empty { arg.env(Resettable::Reset) } else { arg }
    });
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| command.mut_subcommand(name, without_empty_variables))
}

/// clap's message in one line. For a value that can't be used: the variable's name beside the flag's, the reason, and
/// not the value, which may be a secret.
fn refuse(error: &clap::Error) -> Refusal {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Refusal::Asked(error.to_string()),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            Refusal::Wrong("a subcommand is missing: see jobrequest --help".to_owned())
        }
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => Refusal::Wrong(describe_value(error)),
        // Something without a flag may be a URL with a password.
        ErrorKind::UnknownArgument if !is_flag(error) => {
            Refusal::Wrong("unexpected argument that is no flag: see jobrequest --help".to_owned())
        }
        _ => {
            let text = error.to_string();
            let told = text.split("\n\nUsage:").next().unwrap_or_default();
            let told = told.split("\n\nFor more information").next().unwrap_or_default();
            let told = told.strip_prefix("error: ").unwrap_or(told);
            let words: Vec<&str> = told.split_whitespace().collect();
            Refusal::Wrong(format!("{}: see jobrequest --help", words.join(" ")))
        }
    }
}

fn is_flag(error: &clap::Error) -> bool {
    matches!(error.get(ContextKind::InvalidArg), Some(ContextValue::String(text)) if text.starts_with('-'))
}

fn describe_value(error: &clap::Error) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let argument = text(ContextKind::InvalidArg);
    let flag = argument.split(' ').next().unwrap_or_default();
    let place = match environment::variable_of(&Cli::command(), flag) {
        Some(variable) => format!("{variable} ({flag})"),
        None => argument.to_owned(),
    };
    if let Some(why) = std::error::Error::source(error) {
        return format!("{place} {why}");
    }
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(known)) if text(ContextKind::InvalidValue).is_empty() => {
            format!("{place} needs a value: {}", known.join(", "))
        }
        Some(ContextValue::Strings(known)) => format!("{place} is none of: {}", known.join(", ")),
        _ => format!("{place} needs a value"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(arguments: &str) -> String {
        let arguments = std::iter::once("jobrequest").chain(arguments.split_whitespace()).map(OsString::from);
        match parse_from(arguments, &[]) {
            Err(Refusal::Wrong(line)) => {
                assert_eq!(line.lines().count(), 1, "{line}");
                line
            }
            Err(Refusal::Asked(text)) => panic!("asked: {text}"),
            Ok(_) => panic!("accepted: it must be refused"),
        }
    }

    const DATABASE: &str = "--database-url postgres://u:hunter2@localhost/d";

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_setting_has_an_environment_variable_and_says_nothing_of_its_value_in_the_help() {
        for command in Cli::command().get_subcommands().filter(|sub| ["controller", "worker"].contains(&sub.get_name()))
        {
            for arg in command.get_arguments().filter(|arg| !["help", "version"].contains(&arg.get_id().as_str())) {
                let variable = arg.get_env().and_then(|name| name.to_str()).unwrap_or_default();
                let flag = arg.get_long().unwrap_or_default();
                let expected = flag.replace('-', "_").to_uppercase();
                assert_eq!(variable.strip_prefix("JOBREQUEST_").unwrap_or(variable), expected, "--{flag}");
                assert!(arg.is_hide_env_values_set(), "--{flag}");
            }
        }
    }

    #[test]
    fn a_bad_value_is_named_by_its_variable_with_what_would_be_right() {
        for (arguments, expected) in [
            ("--concurrency 0", "JOBREQUEST_CONCURRENCY (--concurrency) is not a whole number from 1 to 10000"),
            ("--concurrency many", "JOBREQUEST_CONCURRENCY (--concurrency) is not a whole number from 1 to 10000"),
            ("--lease-seconds 0", "JOBREQUEST_LEASE_SECONDS (--lease-seconds) is not a whole number from 1 to 86400"),
            ("--poll-seconds=-1", "JOBREQUEST_POLL_SECONDS (--poll-seconds) is not a number from 0.01 to 3600"),
            ("--poll-seconds NaN", "JOBREQUEST_POLL_SECONDS (--poll-seconds) is not a number from 0.01 to 3600"),
            ("--egress-allow 10.0.0.0/33", "JOBREQUEST_EGRESS_ALLOW (--egress-allow): `10.0.0.0/33` is not a CIDR"),
            ("--egress-deny all", "JOBREQUEST_EGRESS_DENY (--egress-deny): `all` is not a CIDR"),
            ("--log loud", "JOBREQUEST_LOG (--log): `loud` is not a level"),
            ("--log-format xml", "JOBREQUEST_LOG_FORMAT (--log-format) is none of: text, json"),
            (
                "--kinds send_mail",
                "JOBREQUEST_KINDS (--kinds): kind \"send_mail\" has no executor; known: resize_image",
            ),
            ("--smtp-url smtp://u:hunter2@mail", "JOBREQUEST_SMTP_URL (--smtp-url)"),
            ("--webhook-secret hunter2", "JOBREQUEST_WEBHOOK_SECRET (--webhook-secret)"),
            ("--object-store-url ftp://u:hunter2@x", "JOBREQUEST_OBJECT_STORE_URL (--object-store-url)"),
            ("--http-addr nowhere", "JOBREQUEST_HTTP_ADDR (--http-addr) is not an address"),
        ] {
            let line = wrong(&format!("worker {DATABASE} {arguments}"));
            assert!(line.starts_with(expected), "{arguments}: {line}");
            assert!(!line.contains("hunter2"), "{line}");
        }
        let line = wrong(&format!("controller {DATABASE} --watch-namespaces Shop"));
        assert!(line.starts_with("JOBREQUEST_WATCH_NAMESPACES (--watch-namespaces): `Shop` is not"), "{line}");
    }

    #[test]
    fn a_bad_database_url_is_refused_without_its_password() {
        for url in ["mysql://u:hunter2@h/d", "u:hunter2@h", "postgres://u:hunter2#@h:1/d", "postgres://u:hunter2@h:x/d"]
        {
            let line = wrong(&format!("worker --database-url {url}"));
            assert!(line.starts_with("DATABASE_URL (--database-url)"), "{line}");
            assert!(!line.contains("hunter2"), "{line}");
        }
        let line = wrong("worker --database-url postgres://u:hunter2@h/d?sslmode=maybe");
        assert!(line.starts_with("DATABASE_URL (--database-url)") && !line.contains("hunter2"), "{line}");
        let direct = wrong(&format!("migrate {DATABASE} --database-direct-url x"));
        assert!(direct.starts_with("JOBREQUEST_DATABASE_DIRECT_URL (--database-direct-url)"), "{direct}");
    }

    #[test]
    fn what_is_not_known_is_said_in_one_line() {
        assert!(wrong("wroker").starts_with("unrecognized subcommand 'wroker'"), "{}", wrong("wroker"));
        assert!(wrong("").starts_with("a subcommand is missing"));
        assert!(wrong("worker --speed 3").starts_with("unexpected argument '--speed' found"));
        for arguments in ["worker postgres://u:hunter2@h/d", "worker --databse-url=postgres://u:hunter2@h/d"] {
            let line = wrong(arguments);
            assert!(line.starts_with("unexpected argument") && !line.contains("hunter2"), "{line}");
        }
        assert!(wrong("jobs get").starts_with("the following required arguments were not provided"));
        assert!(wrong(&format!("jobs get {DATABASE} 12")).contains("is not a job's id"));
    }

    #[test]
    fn an_unknown_variable_stops_every_subcommand() {
        let arguments = || ["jobrequest", "crd"].map(OsString::from);
        let refusal = parse_from(arguments(), &["JOBREQUEST_CONCURENCY".into()]).err();
        let line = "JOBREQUEST_CONCURENCY is not a setting: did you mean JOBREQUEST_CONCURRENCY?";
        assert_eq!(refusal, Some(Refusal::Wrong(line.to_owned())));
        let known =
            ["JOBREQUEST_KINDS", "JOBREQUEST_DEFAULT_TTL_SECONDS", "JOBREQUEST_CACHE", "PATH"].map(OsString::from);
        assert!(parse_from(arguments(), &known).is_ok());
    }
}

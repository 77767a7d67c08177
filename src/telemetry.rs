//! The log: one line an event, to stderr, ids in fields.

use std::io::IsTerminal;
use std::panic::PanicHookInfo;

use tracing_subscriber::EnvFilter;

use crate::cli::{LogFormat, LogSettings};

/// The pool's own warnings repeat, several times over, what /readyz and one line of ours say. The object store tells of
/// its retries with the object's URL, which is a payload's.
const QUIET: [(&str, &str); 2] =
    [("sqlx", "sqlx::pool=error,sqlx_core::pool=error"), ("object_store", "object_store=warn")];

/// Starts the log. Called once, before anything that logs.
pub fn init(settings: &LogSettings) {
    let LogSettings { filter, format } = settings;
    let quiet = QUIET.iter().filter(|(target, _)| !filter.contains(target)).map(|(_, quiet)| *quiet);
    let filter = std::iter::once(filter.as_str()).chain(quiet).collect::<Vec<_>>().join(",");
    // The filter was checked when it was parsed.
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    std::panic::set_hook(Box::new(log_panic));
}

/// Where, and the words that were written down there: a message made at run time may hold a payload.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let message = panic.payload().downcast_ref::<&'static str>().copied().unwrap_or("(made at run time, not shown)");
    let place = panic.location().map(ToString::to_string).unwrap_or_default();
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or_default();
    tracing::error!(place, thread, message = crate::text::cut(message, 256), "panic");
}

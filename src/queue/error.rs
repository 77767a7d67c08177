//! What can go wrong in the queue, and what a caller may do about it.

use uuid::Uuid;

use crate::job::Status;

/// Errors of the queue's operations. None holds a payload or an unbounded text.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Refused before anything was sent: say it to whoever wrote the job.
    #[error("{field} {problem}")]
    PayloadInvalid { field: String, problem: String },
    /// The key belongs to another job of the namespace, with another kind or payload. Final: neither changes.
    #[error("idempotencyKey belongs to job {holder}, whose kind or payload differs: use another key")]
    IdempotencyConflict { holder: Uuid },
    /// The key belongs to a running job that was asked to stop; it is free, or final, once that has ended.
    #[error("idempotencyKey belongs to job {holder}, which is being cancelled")]
    KeyBeingFreed { holder: Uuid },
    /// The row is in a state from which this can't be done.
    #[error("a {from} job can't be {wanted}")]
    InvalidTransition { from: Status, wanted: &'static str },
    /// The resource was let go a short while ago: it is being deleted, and gets no row any more.
    #[error("the resource is being deleted")]
    Released,
    /// Another transaction holds the row just now.
    #[error("another transaction holds the job's row")]
    RowLocked,
    #[error("there is no such job")]
    NotFound,
    /// A row holds what no version of this program writes: the column and what was expected of it.
    #[error("job {id}: column {column} {problem}")]
    RowInvalid { id: Uuid, column: &'static str, problem: &'static str },
    /// The database refused or did not answer. [`Error::is_passing`] says whether trying again makes sense.
    #[error("database: {}", describe(.0))]
    Db(#[from] sqlx::Error),
    /// The statement that this was part of failed, and may succeed later.
    #[error("{message}")]
    Batch { message: String },
    /// Only connections through a transaction pooler look like this, and the settings name none.
    #[error("database: {USE_DIRECT}")]
    UnknownPooler,
    /// No answer within the time limit. It may have happened or not: the operations are safe to repeat.
    #[error("database: no answer within {seconds} s")]
    Timeout { seconds: u64 },
}

impl Error {
    pub(crate) fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::PayloadInvalid { field: field.into(), problem: problem.into() }
    }

    /// The store is away or overloaded, or another transaction stood in the way; the same call may succeed later.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Timeout { .. } | Self::KeyBeingFreed { .. } | Self::RowLocked | Self::Batch { .. } => true,
            Self::Db(error) => match error {
                sqlx::Error::Database(e) => e.code().is_none_or(|code| passing_sqlstate(&code)),
                sqlx::Error::Io(_)
                | sqlx::Error::Tls(_)
                | sqlx::Error::Protocol(_)
                | sqlx::Error::PoolTimedOut
                | sqlx::Error::PoolClosed
                | sqlx::Error::WorkerCrashed => true,
                _ => false,
            },
            Self::PayloadInvalid { .. }
            | Self::IdempotencyConflict { .. }
            | Self::Released
            | Self::InvalidTransition { .. }
            | Self::NotFound
            | Self::UnknownPooler
            | Self::RowInvalid { .. } => false,
        }
    }

    /// The database itself is away, so that no other call gets through either. A call without an answer alone doesn't
    /// say so: a row that somebody's forgotten transaction holds makes it wait as well.
    pub fn is_outage(&self) -> bool {
        let Self::Db(error) = self else { return false };
        match error {
            sqlx::Error::Database(e) => e.code().is_some_and(|code| outage_sqlstate(&code)),
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => true,
            _ => false,
        }
    }

    /// The connection ended before it answered: the server was restarted or the network cut it.
    pub(super) fn is_broken_connection(&self) -> bool {
        match self {
            Self::Db(sqlx::Error::Io(_)) => true,
            Self::Db(sqlx::Error::Database(e)) => e.code().as_deref() == Some("57P01"),
            _ => false,
        }
    }

    /// The database took offence at a value (22, 23) or its size (54): others of the same batch may be taken.
    pub(super) fn refuses_a_value(&self) -> bool {
        let Self::Db(sqlx::Error::Database(e)) = self else { return false };
        e.code().is_some_and(|code| matches!(code.get(..2), Some("22" | "23" | "54")))
    }

    /// The same error for another attempt of a batch. A driver's error can't be cloned: its words and class are kept.
    pub(super) fn again(&self) -> Self {
        match self {
            Self::Timeout { seconds } => Self::Timeout { seconds: *seconds },
            Self::RowInvalid { id, column, problem } => Self::RowInvalid { id: *id, column, problem },
            other if other.is_passing() => Self::Batch { message: other.to_string() },
            other => Self::Db(sqlx::Error::InvalidArgument(other.to_string())),
        }
    }

    pub(crate) fn violates(&self, constraint: &str) -> bool {
        matches!(self, Self::Db(sqlx::Error::Database(e)) if e.constraint() == Some(constraint))
    }
}

/// What one statement may meet and the next may not, beside an outage: transaction rollback (40), a session or
/// statement ended from outside (25P03, 25P04, 57), lock not available (55P03), an internal error (XX, which poolers
/// say too when they have no server), a statement's name that a pooler's server does not know or knows already (26000,
/// 42P05: nothing was done).
fn passing_sqlstate(code: &str) -> bool {
    outage_sqlstate(code)
        || matches!(&code[..2.min(code.len())], "40" | "57" | "XX")
        || matches!(code, "25P03" | "25P04" | "55P03" | "26000" | "42P05")
}

/// Classes and codes of the SQL standard and Postgres: connection (08), no such database or role yet (28, 3D),
/// read-only standby (25006), resources (53), shutting down or starting (57P01, 57P02, 57P03), system (58), schema not
/// there yet (42P01, 42703).
fn outage_sqlstate(code: &str) -> bool {
    matches!(&code[..2.min(code.len())], "08" | "28" | "3D" | "53" | "58")
        || matches!(code, "25006" | "57P01" | "57P02" | "57P03" | "42P01" | "42703")
}

const USE_DIRECT: &str = "a transaction pooler stands before Postgres: set JOBREQUEST_DATABASE_DIRECT_URL \
    (Settings::transaction_pooler in the library), so that statements are sent in a way that it can carry";

/// A statement's name that is unknown or taken already, as another server or client knows it; a setting that can't be
/// carried from server to server.
fn comes_from_a_pooler(code: &str, message: &str) -> bool {
    matches!(code, "26000" | "42P05") || code.starts_with("08") && message.starts_with("unsupported startup parameter")
}

/// The server's primary message without its DETAIL, which quotes rows. A message can quote a value, so a data error
/// (class 22) and a constraint (23) say their code and name only.
fn describe(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(e) => {
            let code = e.code().unwrap_or_default();
            match (&code[..2.min(code.len())], e.constraint()) {
                ("23", Some(constraint)) => format!("refused by constraint {constraint}"),
                ("22" | "23", _) => format!("refused a value (SQLSTATE {code})"),
                _ if comes_from_a_pooler(&code, e.message()) => format!("{USE_DIRECT} (SQLSTATE {code})"),
                _ => format!("{} (SQLSTATE {code})", crate::text::cut(e.message(), 256)),
            }
        }
        sqlx::Error::PoolTimedOut => "no connection became free in time".to_owned(),
        other => crate::text::cut(&other.to_string(), 256).to_owned(),
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_one_statements_way_is_no_outage() {
        for code in ["08006", "28P01", "3D000", "25006", "53300", "57P01", "57P03", "58030", "42P01"] {
            assert!(outage_sqlstate(code) && passing_sqlstate(code), "{code}");
        }
        for code in ["40001", "40P01", "55P03", "57014", "25P03", "XX000"] {
            assert!(!outage_sqlstate(code) && passing_sqlstate(code), "{code}");
        }
        for code in ["", "22P05", "23505", "42501", "54000", "0A000"] {
            assert!(!outage_sqlstate(code) && !passing_sqlstate(code), "{code}");
        }
        for error in [Error::Timeout { seconds: 10 }, Error::RowLocked, Error::KeyBeingFreed { holder: Uuid::nil() }] {
            assert!(error.is_passing() && !error.is_outage(), "{error}");
        }
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        assert!(Error::Db(sqlx::Error::Io(refused)).is_outage() && Error::Db(sqlx::Error::PoolTimedOut).is_outage());
    }
}

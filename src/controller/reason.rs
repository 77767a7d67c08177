//! The reasons of conditions and Events, which people's alerts rely on. docs/conditions.md says what each means; a test
//! holds it to this list.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// The words, and the list of them.
macro_rules! reasons {
    ($($reason:ident),* $(,)?) => {
        /// Why a condition is as it is, or what an Event is about.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Reason {
            $($reason),*
        }

        impl Reason {
            pub(super) const ALL: &[Self] = &[$(Self::$reason),*];

            pub(super) fn as_str(self) -> &'static str {
                match self {
                    $(Self::$reason => stringify!($reason)),*
                }
            }

            /// The reason of a condition; none for a word of another version.
            pub(super) fn of(condition: &Condition) -> Option<Self> {
                Self::ALL.iter().copied().find(|reason| reason.as_str() == condition.reason)
            }
        }
    };
}

reasons! {
    // Of a row that lasts.
    Queued, Suspended, Running, Retrying, Cancelling,
    // Of an end.
    Succeeded, FailedPermanent, Cancelled, RowLost,
    // Of a manifest that became no row.
    PayloadInvalid, SpecInvalid, IdempotencyConflict,
    // Of a row's making.
    Enqueued, Existing, DatabaseUnavailable,
    // Of Events alone.
    Retried, RetryRefused, TTLHeldBack, OrphansHeldBack, Abandoned,
}

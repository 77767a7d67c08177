//! What a running program tells about itself over HTTP: `/metrics`, `/healthz`, `/readyz`. It knows nothing of jobs;
//! the parts of the program report to [`Health`] and [`Metrics`], and [`serve`] shows them.
//!
//! `/healthz` asks "should this process be restarted?": only a loop that has gone silent says yes, a store that is
//! away does not. `/readyz` asks "does it do its work just now?" and names each part that keeps it from that.

mod health;
mod metrics;
mod server;

pub use health::{Beat, Health, Part};
pub use metrics::{EventOutcome, JobOutcome, KindMetrics, Metrics};
pub use server::serve;

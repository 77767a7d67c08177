//! JobRequest: background jobs as Kubernetes resources, run from one Postgres queue.

pub mod kinds;

//! JobRequest: background jobs as Kubernetes resources, run from one Postgres queue.

pub mod admin;
pub mod api;
pub mod controller;
pub mod job;
pub mod kinds;
pub mod queue;
mod text;
pub mod worker;

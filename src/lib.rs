//! JobRequest: background jobs as Kubernetes resources, run from one Postgres queue.

pub mod admin;
pub mod api;
pub mod cli;
pub mod controller;
pub mod job;
pub mod kinds;
pub mod queue;
pub mod telemetry;
mod text;
pub mod worker;

//! JobRequest: background jobs as Kubernetes resources, run from one Postgres queue.
//!
//! In reading order: [`job`], what a job is and what follows what, pure; [`queue`], the table and its operations;
//! [`kinds`], what jobs do; [`worker`], which runs them; [`api`], the resource; [`controller`], which turns resources
//! into rows and rows into statuses; [`check`], which tries them; [`cli`], [`telemetry`] and [`admin`], the process around
//! them.
//!
//! To build a worker of your own: [`kinds::Executor`], [`kinds::Registry`], [`queue::Queue`], [`worker::Worker`].

pub mod admin;
pub mod api;
pub mod check;
pub mod cli;
pub mod controller;
pub mod job;
pub mod kinds;
pub mod queue;
pub mod telemetry;
mod text;
pub mod worker;

//! The whole path: JobRequests on a real API server, rows in a real Postgres, controller and workers as processes.

#[path = "../support/api_proxy.rs"]
#[allow(dead_code, reason = "shared")]
mod api_proxy;
#[path = "../support/db.rs"]
#[allow(dead_code, reason = "shared")]
mod db;
#[path = "../support/program.rs"]
#[allow(dead_code, reason = "shared")]
mod program;
#[path = "../support/sink.rs"]
#[allow(dead_code, reason = "shared")]
mod sink;
#[path = "../support/site.rs"]
mod site;
#[path = "../support/smtp.rs"]
#[allow(dead_code, reason = "shared")]
mod smtp;
#[path = "../support/stores.rs"]
mod stores;
#[path = "../support/wait.rs"]
mod wait;

mod crashes;
mod deletion;
mod events;
mod gitops;
mod idle;
mod installs;
mod keys;
mod kinds;
mod leader;
mod orphans;
mod outages;
mod readme;
mod refusals;
mod resources;
mod rows;
mod ttl;

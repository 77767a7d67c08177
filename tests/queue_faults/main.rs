//! Faults of the database. Each operation of the queue meets each of them, alone: it is done once or not at all,
//! nothing is half done, the error says that it passes, and repeating it as its docs say ends in done once. And the
//! worker goes on when the fault is over.

#[path = "../support/db.rs"]
#[allow(dead_code, reason = "shared")]
mod db;
#[path = "../support/proxy.rs"]
#[allow(dead_code, reason = "shared")]
mod proxy;
#[path = "../support/stage.rs"]
#[allow(dead_code, reason = "shared")]
mod stage;

mod cuts;
mod errors;
mod locks;
mod operations;
mod worker;

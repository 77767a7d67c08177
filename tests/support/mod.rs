//! What the tests share. Each test file is a program of its own and uses a part of it.
#![allow(dead_code)]

pub mod db;
pub mod kubectl;
pub mod program;
pub mod proxy;
pub mod stage;

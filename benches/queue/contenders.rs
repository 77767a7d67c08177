//! Who is measured, at which settings.

use std::path::{Path, PathBuf};

use crate::Outcome;

/// A queue at one of its settings.
pub struct Contender {
    /// As figures name it.
    pub name: &'static str,
    program: Program,
    pub arguments: &'static [&'static str],
    pub environment: &'static [(&'static str, &'static str)],
    /// Whose schema it uses: contenders that share one share the preloaded database.
    pub schema: &'static str,
    /// Whether any job has yet to end.
    pub left: &'static str,
    /// How many jobs came to a good end at the first attempt; none where ended jobs leave no row.
    pub succeeded: Option<&'static str>,
}

#[derive(Clone, Copy)]
enum Program {
    Ours,
    Rust,
    Go,
}

impl Contender {
    pub fn program(&self) -> Outcome<PathBuf> {
        let peer = |name: &str| {
            let directory = std::env::var("JOBREQUEST_BENCH_PEERS").map_err(|_| "JOBREQUEST_BENCH_PEERS: not set")?;
            Ok(Path::new(&directory).join(name))
        };
        match self.program {
            Program::Ours => Ok(std::env::current_exe()?),
            Program::Rust => peer("peers"),
            Program::Go => peer("river"),
        }
    }
}

const OURS_LEFT: &str = "SELECT EXISTS (SELECT FROM jobs WHERE status IN ('queued', 'retrying') AND NOT suspended) \
    OR EXISTS (SELECT FROM jobs WHERE status = 'running')";
const GRAPHILE_LEFT: &str = "SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)";

pub const OURS: Contender = Contender {
    name: "jobrequest",
    program: Program::Ours,
    arguments: &["ours"],
    environment: &[],
    schema: "ours",
    left: OURS_LEFT,
    succeeded: Some("SELECT count(*) FROM jobs WHERE status = 'succeeded' AND attempts = 1"),
};

pub const GRAPHILE: Contender = Contender {
    name: "graphile_worker 0.14.1, local queue 5000",
    program: Program::Rust,
    arguments: &["graphile"],
    environment: &[("LOCAL_QUEUE", "5000")],
    schema: "graphile",
    left: GRAPHILE_LEFT,
    succeeded: None,
};

pub const GRAPHILE_FOUR: Contender = Contender {
    name: "graphile_worker 0.14.1, local queue 4 x 1250",
    environment: &[("LOCAL_QUEUE", "4x1250")],
    ..GRAPHILE
};

pub const GRAPHILE_DEFAULT: Contender =
    Contender { name: "graphile_worker 0.14.1, its defaults", environment: &[("LOCAL_QUEUE", "default")], ..GRAPHILE };

pub const RIVER: Contender = Contender {
    name: "River 0.51.2",
    program: Program::Go,
    arguments: &[],
    environment: &[],
    schema: "river",
    left: "SELECT EXISTS (SELECT FROM river_job WHERE state IN ('available', 'running', 'retryable', 'scheduled'))",
    succeeded: Some("SELECT count(*) FROM river_job WHERE state = 'completed' AND attempt = 1"),
};

pub const SEED: Contender = Contender {
    name: "rust-job-queue-api-worker-system 0.1.0, 16 workers",
    program: Program::Rust,
    arguments: &["seed"],
    environment: &[],
    schema: "seed",
    left: "SELECT EXISTS (SELECT FROM jobs WHERE status IN ('queued', 'retrying')) \
        OR EXISTS (SELECT FROM jobs WHERE status = 'running')",
    succeeded: Some("SELECT count(*) FROM jobs WHERE status = 'succeeded' AND attempts = 1"),
};

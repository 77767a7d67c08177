//! Where the API server and Postgres are: the shared ones, or a test's own, which it may stop and kill.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// An API server and a Postgres.
pub struct Stores {
    pub kubeconfig: PathBuf,
    pub database_url: String,
    /// The directory of what is this test's own.
    own: Option<TempDir>,
}

impl Stores {
    /// The ones that `make test` has started.
    pub fn shared() -> Self {
        let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run make test"));
        Self { kubeconfig: variable("KUBECONFIG").into(), database_url: variable("DATABASE_URL"), own: None }
    }

    /// Starts these parts (as tests/cluster/stores names them) for one test; the others are the shared ones.
    pub async fn own(parts: &[&str]) -> Self {
        let directory = TempDir::with_prefix("jobrequest-stores-").unwrap();
        script(directory.path(), "up", parts).await;
        let mut stores = Self::shared();
        let env = std::fs::read_to_string(directory.path().join("env")).unwrap();
        for line in env.lines() {
            match line.strip_prefix("export ").and_then(|line| line.split_once('=')) {
                Some(("KUBECONFIG", path)) => stores.kubeconfig = path.into(),
                Some(("DATABASE_URL", url)) => stores.database_url = url.to_owned(),
                _ => {}
            }
        }
        stores.own = Some(directory);
        stores
    }

    /// `up`, `down` or `kill` some of this test's own parts; returns when it is done.
    pub async fn run(&self, command: &str, parts: &[&str]) {
        script(self.own.as_ref().expect("the shared stores are left alone").path(), command, parts).await;
    }
}

impl Drop for Stores {
    fn drop(&mut self) {
        let Some(directory) = &self.own else { return };
        if let Err(why) = call(directory.path(), "clean", &[]) {
            eprintln!("{why}");
        }
    }
}

async fn script(directory: &Path, command: &str, parts: &[&str]) {
    let (directory, command) = (directory.to_owned(), command.to_owned());
    let parts: Vec<String> = parts.iter().map(|&part| part.to_owned()).collect();
    let done = tokio::task::spawn_blocking(move || {
        call(&directory, &command, &parts.iter().map(String::as_str).collect::<Vec<_>>())
    });
    if let Err(why) = done.await.unwrap() {
        panic!("{why}");
    }
}

fn call(directory: &Path, command: &str, parts: &[&str]) -> Result<(), String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/stores");
    let done = Command::new(script).arg(command).arg(directory).args(parts).output().map_err(|e| e.to_string())?;
    if done.status.success() {
        Ok(())
    } else {
        Err(format!("stores {command}: {}", String::from_utf8_lossy(&done.stderr)))
    }
}

//! `jobrequest check`: one job through the whole path, for whoever has just installed or upgraded it. It is an ordinary
//! user of the API: it creates a JobRequest, waits for its end, deletes it, and needs the rights for that alone.

use std::time::{Duration, Instant};

use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::json;
use tokio::time::sleep;

use crate::api::{JobRequest, JobRequestSpec, Phase};
use crate::text::cut;

const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// Should the check be killed before it deletes what it made.
const TTL_SECONDS: i32 = 300;

/// What to check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// Where the JobRequest is made; by default the namespace of the kubeconfig's context, or the Pod's own.
    pub namespace: Option<String>,
    /// How long all of it may take.
    pub timeout: Duration,
}

/// Runs the job; a line that says how long it took.
///
/// # Errors
/// One line: the API server can't be reached or refuses, or the job did not succeed in time, and who is to be looked at.
pub async fn run(check: Check) -> Result<String, String> {
    let Check { namespace, timeout } = check;
    let config = Config::infer().await.map_err(|error| format!("no way to an API server: {error}"))?;
    let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
    let client = Client::try_from(config).map_err(|error| format!("no way to an API server: {error}"))?;
    let jobs: Api<JobRequest> = Api::namespaced(client, &namespace);
    let failed = |doing: &str, error: kube::Error| {
        format!("can't {doing} a JobRequest in {namespace}: {}", cut(&error.to_string(), 512))
    };
    let mut spec = JobRequestSpec::new("summarize_text", json!({"text": "Work waits. Workers take it."}));
    spec.ttl_seconds_after_finished = Some(TTL_SECONDS);
    let mut object = JobRequest::new("", spec);
    object.metadata.name = None;
    object.metadata.generate_name = Some("jobrequest-check-".to_owned());
    let started = Instant::now();
    let created = jobs.create(&PostParams::default(), &object).await.map_err(|error| failed("create", error))?;
    let name = created.name_any();
    let outcome = loop {
        match jobs.get(&name).await {
            Ok(now) => match now.status.as_ref().and_then(|status| status.phase) {
                Some(Phase::Succeeded) => {
                    let took = started.elapsed().as_secs_f64();
                    break Ok(format!("{namespace}/{name} succeeded {took:.1} s after its creation"));
                }
                Some(phase) if phase.is_terminal() => break Err(format!("{namespace}/{name} ended as {phase:?}")),
                seen if started.elapsed() >= timeout => {
                    let whom = match seen {
                        None => "no controller has taken it: does one lead, and does it watch this namespace?",
                        Some(_) => "no worker has ended it: is one ready, and does it run summarize_text?",
                    };
                    break Err(format!("{namespace}/{name} has not ended after {} s: {whom}", timeout.as_secs()));
                }
                _ => {}
            },
            Err(error) if started.elapsed() >= timeout => break Err(failed("read", error)),
            Err(_) => {}
        }
        sleep(LOOK_AGAIN).await;
    };
    let deleted = jobs.delete(&name, &DeleteParams::default()).await;
    let line = outcome?;
    deleted.map_err(|error| failed("delete", error))?;
    // The controller lets go of what has ended: that is a part of the path too.
    while jobs.get_opt(&name).await.map_err(|error| failed("read", error))?.is_some() {
        if started.elapsed() >= timeout {
            return Err(format!("{namespace}/{name} has ended, but the controller does not take its finalizer off"));
        }
        sleep(LOOK_AGAIN).await;
    }
    Ok(line)
}

//! A whole system for one test: a database and a namespace of its own, controller and workers as processes, receivers
//! for what the jobs send. Many sites share one API server and one Postgres.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use jobrequest::api::{JobRequest, Phase};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::{Value, json};
use tempfile::TempDir;
use uuid::Uuid;

use super::api_proxy::ApiProxy;
use super::db::Database;
use super::program::{Program, output};
use super::sink::Sink;
use super::smtp::SmtpServer;
use super::stores::Stores;
use super::wait::{PATIENCE, until};

/// What a user may wait for a deletion that has nothing to wait for.
pub const PROMPTLY: Duration = Duration::from_secs(5);

/// The Lease of the install that tests use.
pub const LEASE: &str = "jobrequest-default";

pub struct Site {
    pub namespace: String,
    pub jobs: Api<JobRequest>,
    pub proxy: ApiProxy,
    pub sink: Sink,
    pub smtp: SmtpServer,
    pub directory: TempDir,
    // In this order: the database goes before its server.
    pub database: Database,
    pub stores: Stores,
}

/// A program to be started, with nothing in its environment but what is set here.
#[must_use]
pub struct Setup {
    arguments: Vec<String>,
    environment: BTreeMap<String, String>,
}

impl Setup {
    pub fn set(mut self, name: &str, value: impl ToString) -> Self {
        self.environment.insert(name.to_owned(), value.to_string());
        self
    }

    fn words(&self) -> (Vec<&str>, Vec<(&str, &str)>) {
        let variables = self.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        (self.arguments.iter().map(String::as_str).collect(), variables.collect())
    }

    /// Starts it and waits for nothing.
    pub fn launch(self) -> Program {
        let (arguments, variables) = self.words();
        Program::start(&arguments, &variables)
    }

    /// Starts it and waits until it says that it is ready.
    pub async fn start(self) -> Program {
        let program = self.launch();
        program.until("/readyz", 200).await;
        program
    }

    /// Runs it to its end: exit code, stdout, stderr.
    pub async fn output(self) -> (Option<i32>, String, String) {
        let run = move || {
            let (arguments, variables) = self.words();
            output(&arguments, &variables)
        };
        tokio::task::spawn_blocking(run).await.unwrap()
    }
}

/// The part of a row that tests look at.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct Row {
    pub id: Uuid,
    pub status: String,
    pub attempts: i32,
    pub cancel_requested: bool,
    pub last_error: Option<String>,
    pub owner_uid: Option<Uuid>,
}

impl Site {
    pub async fn new() -> Self {
        Self::serving(Vec::new()).await
    }

    /// Its sink answers `/file` with these bytes.
    pub async fn serving(file: Vec<u8>) -> Self {
        Self::build(Stores::shared(), file).await
    }

    /// On stores of this test's own.
    pub async fn on(stores: Stores) -> Self {
        Self::build(stores, Vec::new()).await
    }

    /// The same, with a cluster that needs something before it knows JobRequests.
    pub async fn prepared(stores: Stores, prepare: impl AsyncFnOnce(&Self)) -> Self {
        let site = Self::build(stores, Vec::new()).await;
        prepare(&site).await;
        site
    }

    async fn build(stores: Stores, file: Vec<u8>) -> Self {
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        let client = Client::try_from(config(&stores.kubeconfig).await).unwrap();
        let namespace = format!("test-{}", &Uuid::new_v4().simple().to_string()[..12]);
        let object = serde_json::from_value(json!({"metadata": {"name": namespace}})).unwrap();
        Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &object).await.unwrap();
        let database = Database::empty_on(stores.database_url.clone()).await;
        jobrequest::queue::migrate(&database.options()).await.unwrap();
        Self {
            jobs: Api::namespaced(client.clone(), &namespace),
            proxy: proxy(&stores, &namespace).await,
            sink: Sink::serving(file).await,
            smtp: SmtpServer::start().await,
            directory: tempfile::tempdir().unwrap(),
            namespace,
            database,
            stores,
        }
    }

    // --- programs

    /// Another way to the API server, with a list and rules of its own.
    pub async fn another_proxy(&self) -> ApiProxy {
        proxy(&self.stores, &self.namespace).await
    }

    /// Kills a controller without a word, and takes its Lease away, so that the next one need not wait for its end.
    pub async fn kill(&self, controller: &mut Program) {
        controller.kill();
        let leases: Api<Lease> = Api::namespaced(self.jobs.clone().into_client(), &self.namespace);
        drop(leases.delete(LEASE, &DeleteParams::default()).await.unwrap());
    }

    /// A controller for this site's namespace, whose calls go through [`Site::proxy`].
    pub fn controller(&self) -> Setup {
        self.program(&["controller"])
            .set("KUBECONFIG", self.proxy.kubeconfig(self.directory.path()).display())
            .set("JOBREQUEST_WATCH_NAMESPACES", &self.namespace)
    }

    pub fn worker(&self) -> Setup {
        self.program(&["worker"])
    }

    /// The binary with these arguments and what is common to all programs of this site.
    pub fn program(&self, arguments: &[&str]) -> Setup {
        let store = url::Url::from_directory_path(self.objects()).unwrap();
        std::fs::create_dir_all(self.objects()).unwrap();
        let environment = BTreeMap::from(
            [
                ("DATABASE_URL", self.database.url()),
                ("JOBREQUEST_LOG", "info,jobrequest=debug".to_owned()),
                ("JOBREQUEST_EGRESS_ALLOW", "127.0.0.0/8".to_owned()),
                ("JOBREQUEST_SMTP_URL", self.smtp.url()),
                ("JOBREQUEST_SMTP_FROM", "shop@example.com".to_owned()),
                ("JOBREQUEST_OBJECT_STORE_URL", store.to_string()),
                ("JOBREQUEST_WEBHOOK_SECRET", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".to_owned()),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        Setup { arguments: arguments.iter().map(|&word| word.to_owned()).collect(), environment }
    }

    /// Where pictures are put.
    pub fn objects(&self) -> PathBuf {
        self.directory.path().join("objects")
    }

    // --- resources

    /// A job that posts to this target of the sink.
    pub fn hook(&self, target: &str) -> Value {
        json!({"kind": "webhook_delivery", "payload": {"url": self.sink.url(target), "body": {"n": 1}}})
    }

    /// Creates a JobRequest.
    pub async fn create(&self, name: &str, spec: Value) -> JobRequest {
        self.create_with(json!({"name": name}), spec).await
    }

    pub async fn create_with(&self, metadata: Value, spec: Value) -> JobRequest {
        let object = json!({
            "apiVersion": "jobrequest.dev/v1alpha1", "kind": "JobRequest", "metadata": metadata, "spec": spec,
        });
        self.jobs.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
    }

    pub async fn get(&self, name: &str) -> Option<JobRequest> {
        self.jobs.get_opt(name).await.unwrap()
    }

    pub async fn all(&self) -> Vec<JobRequest> {
        self.jobs.list(&ListParams::default()).await.unwrap().items
    }

    /// Asks for the deletion and waits for nothing.
    pub async fn delete(&self, name: &str) {
        drop(self.jobs.delete(name, &DeleteParams::default()).await.unwrap());
    }

    /// Waits for a phase; the resource in it.
    pub async fn until_phase(&self, name: &str, wanted: Phase) -> JobRequest {
        until(&format!("{name} is {wanted:?}"), PATIENCE, async || match self.get(name).await {
            Some(now) if phase(&now) == Some(wanted) => Ok(now),
            now => Err(seen(now.as_ref())),
        })
        .await
    }

    /// Waits for a condition (`Ready`) with this status (`True`) and reason (`Succeeded`).
    pub async fn until_condition(&self, name: &str, condition: &str, status: &str, reason: &str) -> JobRequest {
        until(&format!("{name} has {condition}={status}, {reason}"), PATIENCE, async || match self.get(name).await {
            Some(now) if self::condition(&now, condition) == Some((status.to_owned(), reason.to_owned())) => Ok(now),
            now => Err(seen(now.as_ref())),
        })
        .await
    }

    /// Until its run by this mark of a retry has failed for good, and nothing holds it.
    pub async fn until_run_failed(&self, name: &str, mark: &str) -> JobRequest {
        until(&format!("{name} has failed again, {mark}"), PATIENCE, async || match self.get(name).await {
            Some(object)
                if object.status.as_ref().unwrap().last_retry.as_deref() == Some(mark)
                    && phase(&object) == Some(Phase::FailedPermanent)
                    && object.finalizers().is_empty() =>
            {
                Ok(object)
            }
            object => Err(format!("{:?}", object.and_then(|object| object.status))),
        })
        .await
    }

    /// Waits until it is gone, and fails after `limit`.
    pub async fn until_gone(&self, name: &str, limit: Duration) {
        until(&format!("{name} is gone"), limit, async || match self.get(name).await {
            None => Ok(()),
            now => Err(seen(now.as_ref())),
        })
        .await;
    }

    /// Waits until its job is in the database; the row's id.
    pub async fn until_enqueued(&self, object: &JobRequest) -> Uuid {
        let sql = format!("SELECT job_id FROM job_resources WHERE uid = '{}'", object.uid().unwrap());
        until(&format!("{} is enqueued", object.name_any()), PATIENCE, async || {
            let found: Option<(Uuid,)> = sqlx::query_as(sqlx::AssertSqlSafe(sql.clone()))
                .fetch_optional(self.database.pool())
                .await
                .map_err(|error| error.to_string())?;
            found.map(|(id,)| id).ok_or_else(|| "no row".to_owned())
        })
        .await
    }

    // --- rows

    pub async fn row(&self, id: Uuid) -> Row {
        self.database
            .one(&format!(
                "SELECT id, status, attempts, cancel_requested, last_error, owner_uid FROM jobs WHERE id = '{id}'"
            ))
            .await
    }

    pub async fn until_row(&self, id: Uuid, status: &str) -> Row {
        until(&format!("the row is {status}"), PATIENCE, async || {
            let row = self.row(id).await;
            if row.status == status { Ok(row) } else { Err(format!("{row:?}")) }
        })
        .await
    }

    pub async fn count_rows(&self) -> i64 {
        self.database.value("SELECT count(*) FROM jobs").await
    }

    /// Waits until the sink has got this many requests for the target.
    pub async fn until_hits(&self, target: &str, count: usize) {
        until(&format!("{target} is asked for {count} times"), PATIENCE, async || match self.sink.count(target) {
            now if now >= count => Ok(()),
            now => Err(now.to_string()),
        })
        .await;
    }

    // --- tools

    /// Runs kubectl as the administrator in this site's namespace.
    pub async fn try_kubectl(&self, arguments: &[&str], input: &str) -> Result<String, String> {
        self.try_kubectl_anywhere(&[&["--namespace", &self.namespace], arguments].concat(), input).await
    }

    /// The same; it must succeed. Its output.
    pub async fn kubectl(&self, arguments: &[&str], input: &str) -> String {
        let done = self.try_kubectl(arguments, input).await;
        done.unwrap_or_else(|error| panic!("kubectl {}: {error}", arguments.join(" ")))
    }

    /// The same for objects that name their own namespaces.
    pub async fn kubectl_anywhere(&self, arguments: &[&str], input: &str) -> String {
        let done = self.try_kubectl_anywhere(arguments, input).await;
        done.unwrap_or_else(|error| panic!("kubectl {}: {error}", arguments.join(" ")))
    }

    async fn try_kubectl_anywhere(&self, arguments: &[&str], input: &str) -> Result<String, String> {
        let mut command = Command::new("kubectl");
        command.env("KUBECONFIG", &self.stores.kubeconfig).args(arguments);
        let done = run(command, input.to_owned()).await;
        let (out, error) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        if done.status.success() { Ok(out.into_owned()) } else { Err(format!("{out}{error}")) }
    }
}

/// Runs a command with this input on a thread where it may block.
pub async fn run(mut command: Command, input: String) -> Output {
    let done = tokio::task::spawn_blocking(move || {
        use std::io::Write as _;
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a program");
        // A program that ends early need not read it.
        drop(child.stdin.take().unwrap().write_all(input.as_bytes()));
        child.wait_with_output().unwrap()
    });
    done.await.unwrap()
}

/// The Lease lies in the site's own namespace: each has its own leader.
async fn proxy(stores: &Stores, namespace: &str) -> ApiProxy {
    let mut config = config(&stores.kubeconfig).await;
    config.default_namespace = namespace.to_owned();
    ApiProxy::start(config).await
}

/// The client configuration that a kubeconfig file says.
pub async fn config(path: &Path) -> Config {
    Config::from_custom_kubeconfig(Kubeconfig::read_from(path).unwrap(), &KubeConfigOptions::default()).await.unwrap()
}

pub fn phase(object: &JobRequest) -> Option<Phase> {
    object.status.as_ref()?.phase
}

pub fn attempts(object: &JobRequest) -> Option<i32> {
    object.status.as_ref()?.attempts
}

pub fn job_id(object: &JobRequest) -> Uuid {
    object.status.as_ref().and_then(|status| status.job_id.as_ref()).expect("a job id").parse().unwrap()
}

/// Status and reason of a condition.
pub fn condition(object: &JobRequest, name: &str) -> Option<(String, String)> {
    let found = object.status.as_ref()?.condition(name)?;
    Some((found.status.clone(), found.reason.clone()))
}

/// What a failed wait shows of a resource.
fn seen(object: Option<&JobRequest>) -> String {
    object.map_or_else(
        || "no such resource".to_owned(),
        |object| {
            let meta = &object.metadata;
            let status = serde_json::to_string(&object.status).unwrap_or_default();
            format!("finalizers {:?}, deleted {:?}, status {status}", meta.finalizers, meta.deletion_timestamp)
        },
    )
}

/// A spec with some of its fields set.
pub fn with(mut spec: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        spec[name] = value.clone();
    }
    spec
}

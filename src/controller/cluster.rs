//! Which cluster this is, and that the install's rows are its own: another cluster under the same name would cancel
//! them all as orphans, and give its resources the keys of the first.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, Client, ResourceExt};

use super::{Error, Result, patch};
use crate::admin::{Beat, Part};
use crate::queue::{Binding, Queue};

/// The namespace that every cluster has as long as it lives: its uid is the cluster's.
const NAMESPACE: &str = "kube-system";
/// How soon it is asked for again.
const AGAIN: Duration = Duration::from_secs(2);

/// This cluster, and the one whose place it takes if the database knows another.
#[derive(Debug)]
pub(super) struct Cluster {
    uid: String,
    adopts: Option<String>,
}

impl Cluster {
    /// Asks until the API server says it.
    pub(super) async fn identify(client: &Client, adopts: Option<String>, part: &Part, beat: &Beat) -> Self {
        loop {
            beat.beat();
            match ask(client).await {
                Ok(uid) => return Self { uid, adopts },
                Err(error) => part.not_ready(format!("the namespace {NAMESPACE}, whose uid is the cluster's: {error}")),
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Before anything else is asked of the database.
    ///
    /// # Errors
    /// [`Error::OtherCluster`] when the install is another's.
    pub(super) async fn bind(&self, queue: &Queue) -> Result<()> {
        match queue.bind_install(&self.uid, self.adopts.as_deref()).await? {
            Binding::Ours { adopted: false } => Ok(()),
            Binding::Ours { adopted: true } => {
                let (install, from) = (&queue.settings().install, self.adopts.as_deref().unwrap_or_default());
                tracing::warn!(install, from, cluster = self.uid, "took over the rows and keys of another cluster");
                Ok(())
            }
            Binding::Others { cluster } => Err(self.is_not(cluster, queue)),
        }
    }

    /// Whether the install is still this cluster's.
    ///
    /// # Errors
    /// [`Error::OtherCluster`] when another has taken it over.
    pub(super) async fn confirm(&self, queue: &Queue) -> Result<()> {
        match queue.install_cluster().await? {
            Some(bound) if bound != self.uid => Err(self.is_not(bound, queue)),
            Some(_) | None => Ok(()),
        }
    }

    /// Whether the API server is still this cluster's: an address may lead to another one by now.
    ///
    /// # Errors
    /// [`Error::OtherCluster`] when it is not.
    pub(super) async fn confirm_server(&self, client: &Client, queue: &Queue) -> Result<()> {
        let now = ask(client).await?;
        if now == self.uid {
            return Ok(());
        }
        Err(Self { uid: now, adopts: None }.is_not(self.uid.clone(), queue))
    }

    fn is_not(&self, bound: String, queue: &Queue) -> Error {
        Error::OtherCluster { install: queue.settings().install.clone(), bound, this: self.uid.clone() }
    }
}

async fn ask(client: &Client) -> Result<String> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    patch::bounded(namespaces.get(NAMESPACE)).await?.uid().ok_or(Error::NoUid)
}

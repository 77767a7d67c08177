//! Which cluster an install's rows and keys belong to.

use super::Queue;
use super::error::Result;

/// Whose an install is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Binding {
    /// This cluster's; `adopted` when it was another's until now.
    Ours { adopted: bool },
    /// Another cluster's, of this uid.
    Others { cluster: String },
}

impl Queue {
    /// Binds this install to a cluster, if it is bound to none, or to the one whose uid is `adopt`. Safe to repeat.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn bind_install(&self, cluster: &str, adopt: Option<&str>) -> Result<Binding> {
        // Each round loses a race with another cluster at most.
        loop {
            match self.install_cluster().await? {
                Some(bound) if bound == cluster => return Ok(Binding::Ours { adopted: false }),
                Some(bound) if adopt != Some(bound.as_str()) => return Ok(Binding::Others { cluster: bound }),
                Some(bound) => {
                    if self.bind(cluster, &bound).await? {
                        return Ok(Binding::Ours { adopted: true });
                    }
                }
                None => {
                    if self.bind(cluster, "").await? {
                        return Ok(Binding::Ours { adopted: false });
                    }
                }
            }
        }
    }

    /// From this cluster, or from none when there is no binding yet; false when it is another's by now.
    async fn bind(&self, cluster: &str, from: &str) -> Result<bool> {
        self.bounded(async {
            let done = sqlx::query(
                "INSERT INTO job_installs AS i (install, cluster) VALUES ($1, $2) ON CONFLICT (install) DO UPDATE \
                 SET cluster = $2, bound_at = now(), adopted_at = now() WHERE i.cluster = $3",
            )
            .bind(&self.settings.install)
            .bind(cluster)
            .bind(from)
            .execute(&self.pool)
            .await?;
            Ok(done.rows_affected() > 0)
        })
        .await
    }

    /// The uid of the cluster that this install is bound to.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn install_cluster(&self) -> Result<Option<String>> {
        self.bounded(async {
            let bound: Option<(String,)> = sqlx::query_as("SELECT cluster FROM job_installs WHERE install = $1")
                .bind(&self.settings.install)
                .fetch_optional(&self.pool)
                .await?;
            Ok(bound.map(|(cluster,)| cluster))
        })
        .await
    }
}

//! What the orphan sweep asks and clears away: resources that hold rows, those whose row is gone, old releases.

use uuid::Uuid;

use super::Queue;
use super::error::Result;
use super::resources::{RELEASE_KEPT_SECONDS, ResourceRef};

/// How many releases one call forgets at most.
const RELEASES: i64 = 5000;

impl Queue {
    /// Forgets releases older than ten minutes, at most 5000 a call.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn forget_releases(&self) -> Result<()> {
        self.bounded(async {
            sqlx::query(
                "DELETE FROM job_releases WHERE uid IN (SELECT uid FROM job_releases \
                 WHERE released_at < now() - make_interval(secs => $1) ORDER BY released_at LIMIT $2)",
            )
            .bind(RELEASE_KEPT_SECONDS)
            .bind(RELEASES)
            .execute(&self.pool)
            .await?;
            Ok(())
        })
        .await
    }

    /// Resources that hold live rows of this install, in order of uid after `after`: for the orphan sweep.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn holders_of_live_rows(&self, after: Uuid, limit: i64) -> Result<Vec<ResourceRef>> {
        self.resources(
            "SELECT r.uid, r.namespace, r.name FROM job_resources r JOIN jobs j ON j.id = r.job_id \
             WHERE r.install = $1 AND r.uid > $2 \
               AND (j.mirror_due OR j.status IN ('queued', 'retrying', 'running')) ORDER BY r.uid LIMIT $3",
            after,
            limit,
        )
        .await
    }

    /// Resources whose row is gone though nothing of ours removed it.
    ///
    /// # Errors
    /// [`Error::Db`](super::Error::Db), [`Error::Timeout`](super::Error::Timeout).
    pub async fn holders_of_vanished_rows(&self, after: Uuid, limit: i64) -> Result<Vec<ResourceRef>> {
        self.resources(
            "SELECT r.uid, r.namespace, r.name FROM job_resources r \
             WHERE r.install = $1 AND r.uid > $2 AND NOT EXISTS (SELECT FROM jobs j WHERE j.id = r.job_id) \
               AND NOT EXISTS (SELECT FROM job_keys k WHERE k.install = r.install AND k.namespace = r.namespace \
                   AND k.job_id = r.job_id) \
             ORDER BY r.uid LIMIT $3",
            after,
            limit,
        )
        .await
    }

    async fn resources(&self, sql: &'static str, after: Uuid, limit: i64) -> Result<Vec<ResourceRef>> {
        let rows: Vec<(Uuid, String, String)> = self
            .bounded(async {
                let query = sqlx::query_as(sql).bind(&self.settings.install).bind(after).bind(limit);
                Ok(query.fetch_all(&self.pool).await?)
            })
            .await?;
        Ok(rows.into_iter().map(|(uid, namespace, name)| ResourceRef { uid, namespace, name }).collect())
    }
}

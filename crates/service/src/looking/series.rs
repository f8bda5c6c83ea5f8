//! Series: what happened to a policy over time, in buckets of equal width, for people who look at it.
//!
//! Not a stage that rollouts pass. Everything is a difference of two totals of the history, so what the buckets of a
//! window have adds up to what the tallies have counted in it. The minute that runs now comes from the tallies now. A
//! bucket that nothing is known of has no values: the service was not running, or the history begins later.

use forebay_domain::looking::history::{ReadHistory, Series, SeriesRequest, Window, columns, minute};
use forebay_store::error::StoreError;
use tracing::instrument;

use crate::{Buffer, error::BufferError, policies};

impl Buffer {
    /// What happened to a policy over time.
    #[instrument(level = "debug", skip_all, fields(policy.name = %request.policy))]
    pub async fn series(&self, request: SeriesRequest) -> Result<Series, BufferError> {
        let policy = policies::existing_policy(self, &request.policy).await?;
        let now = self.clock.now();
        let window = Window::of(&request, now)?;
        let Window { from, to, step } = window;
        let history = self.store.read(ReadHistory { policy: policy.policy_pk, from, to, step }).await?;
        let metrics = request.metrics;
        let columns = move || columns(&history, window, minute(now), &metrics);
        // Thousands of rows with dozens of totals take milliseconds.
        let columns = tokio::task::spawn_blocking(columns).await.map_err(|_| StoreError::Closed)?;
        Ok(Series { from, to, step, columns })
    }
}

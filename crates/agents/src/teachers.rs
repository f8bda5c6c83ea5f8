//! Engines as teachers: they score the segments of finished sessions.

use std::time::Duration;

use async_trait::async_trait;
use forebay_domain::ids::SessionId;
use forebay_gateway::upstream::{Scoring, probe::LogprobScale};
use forebay_service::teachers::{TeacherFault, Teachers, Unscored};
use futures::{StreamExt as _, TryStreamExt as _};
use tokio::time::Instant;

use crate::{
    sampling::widened,
    scoring::{SCORE_TIMEOUT, SCORES_AT_ONCE},
    upstreams::{Route, Upstreams},
};

/// How long it is believed what a probe found.
const PROBE_EVERY: Duration = Duration::from_mins(1);

/// How long an engine has to answer a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

#[async_trait]
impl Teachers for Upstreams {
    fn knows(&self, teacher: &str) -> bool {
        self.named(teacher).is_some()
    }

    async fn check(&self, teacher: &str, temperature: f32) -> Result<(), TeacherFault> {
        let route = self.named(teacher).ok_or(TeacherFault::Unknown)?;
        route.scale_of_scores().await?.check_scores(widened(temperature)).map_err(TeacherFault::Unsuited)
    }

    async fn score(
        &self,
        teacher: &str,
        session: SessionId,
        temperature: f32,
        segments: &[Unscored<'_>],
    ) -> Result<Vec<Vec<f32>>, TeacherFault> {
        let route = self.named(teacher).ok_or(TeacherFault::Unknown)?;
        let temperature = widened(temperature);
        // At temperature 1 it does not matter whether scores contain it.
        if (temperature - 1.0).abs() > f64::EPSILON {
            route.scale_of_scores().await?.check_scores(temperature).map_err(TeacherFault::Unsuited)?;
        }
        let session = session.to_string();
        let scored = segments.iter().enumerate().map(|(index, segment)| {
            // SGLang aborts all requests whose id begins with the given one.
            let rid = format!("{:016x}-score-{session}-{index}", rand::random::<u64>());
            let (route, session) = (&route, &session);
            async move {
                let scoring = Scoring {
                    ids: segment.ids,
                    prompt_len: segment.prompt,
                    temperature,
                    model: &route.model,
                    session,
                    rid: &rid,
                };
                route.score(&scoring).await
            }
        });
        let scored: Vec<_> = scored.collect();
        futures::stream::iter(scored).buffered(SCORES_AT_ONCE).try_collect().await
    }
}

impl Route {
    async fn score(&self, scoring: &Scoring<'_>) -> Result<Vec<f32>, TeacherFault> {
        let failed = TeacherFault::Failed;
        let _one = self.scoring.acquire().await.map_err(|error| failed(error.to_string()))?;
        match tokio::time::timeout(SCORE_TIMEOUT, self.upstream.score(scoring)).await {
            Ok(scores) => scores.map_err(|error| failed(error.to_string())),
            Err(_) => Err(failed(format!("it did not answer within {} s", SCORE_TIMEOUT.as_secs()))),
        }
    }

    /// What a probe found, at most a minute ago. A failure is not remembered.
    pub(crate) async fn scale_of_scores(&self) -> Result<LogprobScale, TeacherFault> {
        let mut found = self.scores.lock().await;
        if let Some((at, scale)) = &*found
            && at.elapsed() < PROBE_EVERY
        {
            return Ok(scale.clone());
        }
        let probed = tokio::time::timeout(PROBE_TIMEOUT, self.upstream.probe_scores(&self.model)).await;
        let Ok(scale) = probed else {
            let why = format!("it did not answer a probe within {} s", PROBE_TIMEOUT.as_secs());
            return Err(TeacherFault::Failed(why));
        };
        let scale = scale.map_err(|error| TeacherFault::Failed(error.to_string()))?;
        *found = Some((Instant::now(), scale.clone()));
        Ok(scale)
    }
}

//! Posts rollouts in chunks of bounded size, and again where the service had no room.

use std::time::Duration;

use anyhow::bail;
use forebay_client::{
    Client, ClientError,
    wire::{BulkLine, ImportReport, Problem, Trajectory},
};
use serde_json::value::RawValue;

use crate::commands::{
    media::{self, MediaFolder},
    service::ServiceArgs,
    text::shown,
};

/// The most rollouts of one request.
const CHUNK_ROLLOUTS: usize = 256;

/// The most bytes of one request, as they are estimated. A larger rollout is sent alone.
const CHUNK_BYTES: usize = 4 << 20;

/// Estimated bytes of JSON for a token: its id and its bit of the mask.
const TOKEN_BYTES: usize = 9;

/// Estimated bytes of JSON for a log-probability.
const LOGPROB_BYTES: usize = 12;

/// The first pause if the service has no room. It doubles up to [`PAUSE_MAX`].
const FIRST_PAUSE: Duration = Duration::from_millis(500);

const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Statuses of rollouts for which the service has no room now.
const NO_ROOM: [u16; 2] = [429, 503];

/// Rollouts that are posted together, each with the line of its document.
#[derive(Default)]
pub(super) struct Chunk {
    lines: Vec<u64>,
    trajectories: Vec<Trajectory>,
    bytes: usize,
}

impl Chunk {
    /// Whether a rollout may be added. An empty chunk has room for any.
    pub(super) fn has_room(&self, trajectory: &Trajectory) -> bool {
        let is_small = self.trajectories.len() < CHUNK_ROLLOUTS && self.bytes + bytes(trajectory) <= CHUNK_BYTES;
        self.trajectories.is_empty() || is_small
    }

    pub(super) fn push(&mut self, line: u64, trajectory: Trajectory) {
        self.bytes += bytes(&trajectory);
        self.lines.push(line);
        self.trajectories.push(trajectory);
    }

    /// Takes the second half out.
    fn split(&mut self) -> Self {
        let at = self.lines.len() / 2;
        let half = Self { lines: self.lines.split_off(at), trajectories: self.trajectories.split_off(at), bytes: 0 };
        Self { bytes: half.trajectories.iter().map(bytes).sum(), ..half }
    }
}

/// The estimated bytes of a rollout as JSON.
fn bytes(trajectory: &Trajectory) -> usize {
    let logprobs = |values: &Option<Vec<f32>>| values.as_ref().map_or(0, |values| values.len() * LOGPROB_BYTES);
    let segments = trajectory.segments.iter().map(|one| one.tokens.len() * TOKEN_BYTES + logprobs(&one.logprobs));
    let turns = trajectory
        .turns
        .iter()
        .map(|one| (one.prompt_tokens.len() + one.tokens.len()) * TOKEN_BYTES + logprobs(&one.logprobs));
    let texts =
        [&trajectory.messages, &trajectory.metadata].map(|text| text.as_ref().map_or(0, |text| text.get().len()));
    segments.sum::<usize>() + turns.sum::<usize>() + texts.iter().sum::<usize>()
}

/// Posts chunks to a service.
pub(super) struct Poster {
    service: ServiceArgs,
    client: Client,
    patience: Duration,
}

impl Poster {
    pub(super) fn new(service: ServiceArgs, patience: Duration) -> anyhow::Result<Self> {
        let client = service.client()?;
        Ok(Self { service, client, patience })
    }

    /// Uploads what a trajectory names and the folder has. What it has not may be at the service, which says so otherwise.
    pub(super) async fn upload_named(&self, folder: &mut MediaFolder, trajectory: &Trajectory) -> anyhow::Result<()> {
        let mut named = folder.named_first(trajectory.messages.as_deref().map(RawValue::get), &[]);
        for segment in &trajectory.segments {
            named.extend(folder.named_first(None, &segment.media));
        }
        for digest in named {
            let Some(bytes) = folder.read(digest)? else { continue };
            let kind = media::media_type(&bytes);
            self.client
                .put_media(&digest.to_string(), bytes.into(), kind)
                .await
                .map_err(|error| self.service.failed(error))?;
        }
        Ok(())
    }

    /// Posts a chunk, and counts the answers. Rollouts for which there is no room are posted again until the patience
    /// ends.
    pub(super) async fn post(&self, chunk: Chunk, report: &mut ImportReport) -> anyhow::Result<()> {
        let mut left = vec![chunk];
        let (mut pause, mut waited) = (FIRST_PAUSE, Duration::ZERO);
        while let Some(mut chunk) = left.pop() {
            if chunk.trajectories.is_empty() {
                continue;
            }
            let answers = match self.client.post_bulk(&chunk.trajectories).await {
                Ok(answers) => answers,
                Err(ClientError::Refused(problem)) if problem.status == 413 && chunk.trajectories.len() > 1 => {
                    let rest = chunk.split();
                    left.extend([rest, chunk]);
                    continue;
                }
                Err(ClientError::Refused(problem)) if problem.status == 413 => vec![refused(*problem)],
                Err(error) => return Err(self.service.failed(error)),
            };
            let Some((again, problem)) = count(chunk, answers, report) else { continue };
            if waited >= self.patience {
                let detail = problem.detail.unwrap_or(problem.title);
                bail!("the service had no room for {} s: {}", waited.as_secs(), shown(&detail));
            }
            let asked = Duration::from_secs(problem.retry_after_s.unwrap_or(0));
            let pause_now = pause.max(asked).min(self.patience.saturating_sub(waited));
            tokio::time::sleep(pause_now).await;
            waited += pause_now.max(Duration::from_millis(1));
            pause = (pause * 2).min(PAUSE_MAX);
            left.push(again);
        }
        Ok(())
    }
}

/// Counts the answers to a chunk. Returns the rollouts for which there was no room, and the problem of the first.
fn count(chunk: Chunk, answers: Vec<BulkLine>, report: &mut ImportReport) -> Option<(Chunk, Problem)> {
    let mut again = Chunk::default();
    let mut first = None;
    for ((line, trajectory), answer) in chunk.lines.into_iter().zip(chunk.trajectories).zip(answers) {
        if NO_ROOM.contains(&answer.status) {
            first.get_or_insert(answer.problem.unwrap_or_default());
            again.push(line, trajectory);
        } else {
            report.answered(line, trajectory.rollout_id.as_deref(), answer);
        }
    }
    first.map(|problem| (again, problem))
}

fn refused(problem: Problem) -> BulkLine {
    BulkLine { line: 1, status: problem.status, receipt: None, problem: Some(problem) }
}

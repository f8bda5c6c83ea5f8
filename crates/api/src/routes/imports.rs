//! `/imports/{format}`: recorded rollouts of other projects are read, and ingested like posted trajectories.

use std::{collections::VecDeque, io::Cursor};

use axum::{Json, body::Body, extract::State, http::HeaderMap};
use bytes::Bytes;
use forebay_bounds::budget::{Budget, Shares};
use forebay_domain::{access::Grant, ingest::new_rollout::NewRollout, refusal::Refusal};
use forebay_formats::{GroupSizes, Importer, Options, Record};
use forebay_gateway::structure;
use forebay_service::Buffer;
use forebay_wire::{ImportReport, Trajectory, Violation};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        body::{self, Media, ReadBody},
        guard::{Caller, owner},
        params::{FormatPath, Query},
        problem::Failure,
    },
    openapi::InvalidQuery,
    routes::trajectories::{self, BULK_BYTES, BULK_LINES, Line, SegmentMemory},
};

/// Bytes of a token of a segment in memory: its id, its bit of the mask, and its log-probability.
const TOKEN_BYTES: usize = 9;

/// What a caller says about all rollouts of an import. Each parameter takes precedence over what the body says.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ImportQuery {
    /// Policy of the rollouts. In the format `verifiers`, `{agent}` stands for the name of a trace's agent.
    #[param(min_length = 1, max_length = 256)]
    policy: Option<String>,
    /// Label of their environment.
    #[param(min_length = 1, max_length = 256)]
    environment: Option<String>,
    /// Size of their groups.
    #[param(minimum = 1, maximum = 65536)]
    group_size: Option<u32>,
    /// `true`: import also groups that have more rollouts in the body than `group_size` says. The others are stored as
    /// late, without their tokens and messages. Default `false`: such a body is refused.
    allow_late: Option<bool>,
    /// Weight version that generated them.
    #[param(minimum = 0)]
    policy_version: Option<i64>,
    /// Text before every group id and rollout id.
    #[param(max_length = 256)]
    prefix: Option<String>,
    /// JSON pointer to the reward in a record.
    #[param(pattern = "^/")]
    reward_at: Option<String>,
    /// JSON pointer to the group id in a record.
    #[param(pattern = "^/")]
    group_at: Option<String>,
    /// JSON pointer to the rollout id in a record.
    #[param(pattern = "^/")]
    rollout_at: Option<String>,
}

impl ImportQuery {
    fn options(self, tokens_max: usize) -> Result<Options, Failure> {
        let Self { policy, environment, group_size, policy_version, prefix, reward_at, group_at, rollout_at, .. } =
            self;
        let options = Options {
            policy,
            environment,
            group_size,
            policy_version,
            prefix,
            reward_at,
            group_at,
            rollout_at,
            tokens_max,
        };
        options.check().map_err(|(name, why)| Failure::invalid(name, why))?;
        Ok(options)
    }
}

/// Import recorded rollouts
///
/// The body is a source of a format: `atif`, `chat`, `forebay`, `nemo-gym` or `verifiers`. It is a document per line, or
/// for `atif` and `chat` also one document. Every rollout is stored or refused on its own, and the response says what
/// became of them. A repeated import stores nothing twice.
#[utoipa::path(
    post,
    path = "/imports/{format}",
    operation_id = "post_import",
    tag = "agents",
    params(("format" = String, Path, description = "Name of the format"), ImportQuery),
    request_body(
        content((Object = "application/x-ndjson"), (Object = "application/json")),
        description = "Documents of the format. `Content-Encoding` may be gzip or zstd."
    ),
    responses(
        (status = 200, description = "What became of the documents", body = ImportReport),
        (status = 404, description = "No such format"),
        (status = 413, description = "Too large; nothing was stored"),
        (status = 503, description = "The byte budget is used up, or the store cannot write"),
        InvalidQuery,
    )
)]
pub(crate) async fn post(
    State(api): State<Api>,
    Caller(grant): Caller,
    FormatPath(format): FormatPath,
    Query(query): Query<ImportQuery>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<ImportReport>, Failure> {
    if body::media(&headers)? == Media::Arrow {
        return Err(body::unsupported("Content-Type must be application/json or application/x-ndjson"));
    }
    let checks_groups = query.group_size.is_some() && !query.allow_late.unwrap_or(false);
    let options = query.options(api.buffer.trajectory_limits().tokens_max)?;
    if !api.buffer.is_writable() {
        return Err(Failure::unwritable());
    }
    let budget = &api.budgets.posts;
    let ReadBody { bytes, mut shares } = body::read(budget, owner(&grant), api.limits, &headers, body).await?;
    let documents = Importer::new(format, &options, Cursor::new(bytes.clone()));
    let price = bytes.len() + trajectories::run(false, || values_price(documents)).await?;
    body::pay(budget, &mut shares, price)?;
    let first_look = checks_groups.then(|| Importer::new(format, &options, Cursor::new(bytes.clone())));
    let importer = Importer::new(format, &options, Cursor::new(bytes));
    let source = Source { importer, waiting: VecDeque::new(), budget: budget.clone(), held: shares.bytes() };
    let report = ImportReport::new(format.name);
    let import = |buffer: Buffer| async move {
        if let Some(importer) = first_look {
            check_groups(importer).await?;
        }
        ingest(&buffer, grant, source, shares, report).await
    };
    api.run_uncancelled(import).await.map(Json)
}

/// What the values of the document cost that has the most. One document is read at a time.
fn values_price(mut documents: Importer<Cursor<Bytes>>) -> usize {
    let of_values = |document: Vec<u8>| structure::price_with_columns(&document) - document.len();
    let mut highest = 0;
    // A body in memory can always be read.
    while let Ok(Some((_, document))) = documents.next_document() {
        highest = highest.max(document.map_or(0, of_values));
    }
    highest
}

/// Checks before anything is stored that no group of a body has more rollouts than places.
async fn check_groups(importer: Importer<Cursor<Bytes>>) -> Result<(), Failure> {
    let count = move || {
        let mut sizes = GroupSizes::default();
        // A body in memory can always be read.
        sizes.read(importer).ok().and_then(|()| sizes.overfull())
    };
    trajectories::run(false, count).await?.map_or(Ok(()), |overfull| {
        let detail = format!("{overfull}. Nothing is imported; `allow_late=true` imports it like this");
        Err(Failure::invalid("group_size", detail))
    })
}

/// The records of a body, and where the memory for their rollouts comes from.
struct Source {
    importer: Importer<Cursor<Bytes>>,
    /// Rollouts that were read, and for which there was no memory yet.
    waiting: VecDeque<(u64, Trajectory)>,
    budget: Budget,
    /// The bytes that the body holds.
    held: usize,
}

/// What is ingested together.
#[derive(Default)]
struct Slice {
    lines: Vec<Line>,
    /// Line and rollout of each entry of `lines`, which are numbered by their index.
    names: Vec<(u64, Option<String>)>,
    refused: Vec<(u64, Vec<Violation>)>,
    read: Vec<(usize, Vec<(&'static str, u64)>)>,
    is_last: bool,
}

/// Ingests slice by slice: each slice is stored before the next one is read. The shares of the body are held to the end.
async fn ingest(
    buffer: &Buffer,
    grant: Grant,
    mut source: Source,
    shares: Shares,
    mut report: ImportReport,
) -> Result<ImportReport, Failure> {
    loop {
        let (decoder, caller) = (buffer.clone(), grant.clone());
        let mut memory = SegmentMemory::new(&source.budget, source.held);
        let decode = move || {
            let slice = source.slice(&decoder, &caller, &mut memory);
            (slice, source, memory)
        };
        let (slice, rest, memory) = trajectories::run(false, decode).await?;
        source = rest;
        for (rollouts, notes) in slice.read {
            report.read_document(rollouts, notes);
        }
        for (line, violations) in slice.refused {
            report.refuse_document(line, violations);
        }
        for answer in trajectories::ingest_lines(buffer, slice.lines).await {
            let (line, rollout_id) = &slice.names[answer.line as usize];
            report.answered(*line, rollout_id.as_deref(), answer);
        }
        drop(memory);
        if slice.is_last {
            drop(shares);
            return Ok(report);
        }
    }
}

impl Source {
    fn slice(&mut self, buffer: &Buffer, grant: &Grant, memory: &mut SegmentMemory) -> Slice {
        let mut slice = Slice::default();
        let mut bytes = 0;
        while slice.lines.len() + slice.refused.len() < BULK_LINES && bytes < BULK_BYTES {
            if self.waiting.is_empty() {
                // A body in memory can always be read.
                let Ok(Some(record)) = self.importer.next_record() else {
                    slice.is_last = true;
                    break;
                };
                self.take(record, &mut slice);
                continue;
            }
            let Some((line, trajectory)) = self.waiting.pop_front() else { continue };
            match prepare(buffer, grant, trajectory, memory) {
                Err(kept) => {
                    self.waiting.push_front((line, *kept));
                    break;
                }
                Ok((rollout_id, prepared)) => {
                    bytes += prepared.as_ref().map_or(0, NewRollout::payload_bytes);
                    let number = slice.lines.len() as u64;
                    slice.lines.push(Line { number, prepared: prepared.map_err(Failure::of_single_object) });
                    slice.names.push((line, rollout_id));
                }
            }
        }
        slice
    }

    fn take(&mut self, Record { line, outcome }: Record, slice: &mut Slice) {
        match outcome {
            Err(violations) => slice.refused.push((line, violations)),
            Ok(imported) => {
                let notes = imported.notes.iter().map(|(note, times)| (note.as_str(), *times)).collect();
                slice.read.push((imported.trajectories.len(), notes));
                self.waiting.extend(imported.trajectories.into_iter().map(|trajectory| (line, trajectory)));
            }
        }
    }
}

/// The id of a rollout, and the rollout to store or why it is refused.
type Prepared = (Option<String>, Result<NewRollout, Failure>);

/// Validates and packs a rollout. The rollout comes back if there is no memory for it while others hold some.
fn prepare(
    buffer: &Buffer,
    grant: &Grant,
    trajectory: Trajectory,
    memory: &mut SegmentMemory,
) -> Result<Prepared, Box<Trajectory>> {
    let holds_memory = memory.is_held();
    // Branches repeat what they share, so segments may be larger than the body that pays for them.
    let tokens: usize = trajectory.segments.iter().map(|segment| segment.tokens.len()).sum();
    if tokens > 0 && !memory.take(tokens * TOKEN_BYTES) {
        if holds_memory {
            return Err(Box::new(trajectory));
        }
        return Ok((trajectory.rollout_id, Err(Refusal::NoMemory.into())));
    }
    let has_inline = trajectory.messages.as_ref().is_some_and(|messages| messages.get().contains("\"data:"));
    let kept = (holds_memory && (has_inline || !trajectory.turns.is_empty())).then(|| Box::new(trajectory.clone()));
    let rollout_id = trajectory.rollout_id.clone();
    let prepared = match (trajectories::prepare(buffer, grant, vec![trajectory], memory), kept) {
        (Err(Refusal::NoMemory), Some(kept)) => return Err(kept),
        (Err(refusal), _) => Err(refusal.into()),
        (Ok(mut one), _) => one.pop().ok_or_else(body::stopped),
    };
    Ok((rollout_id, prepared))
}

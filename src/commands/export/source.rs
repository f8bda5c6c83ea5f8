//! Where rollouts are read: a running service, or a database.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context as _, anyhow};
use arrow_array::{RecordBatch, cast::AsArray as _};
use clap::Args;
use forebay_client::{
    Client, ClientError, ClientOptions, Export, RetryPolicy,
    wire::{ApiKey, ExportCounts, ExportedRollout, MediaSpan},
};
use forebay_domain::{ids::Run, refusal::Refusal};
use forebay_service::{
    blobs,
    error::BufferError,
    looking::export::{self, ExportFilter, ExportReader, Expression},
};
use forebay_store::{self as store, Store};
use forebay_telemetry::metrics::Metrics;
use serde_json::value::RawValue;

use super::{Selection, columns::Columns};
use crate::commands::media::MediaFolder;

/// What the end of an export lacks if it is not the whole of it.
const NO_SUMMARY: &str = "the export ended early: the service sent no summary";

/// Where to read.
#[derive(Args)]
#[command(next_help_heading = "Where to read")]
pub(crate) struct PlaceArgs {
    /// URL of the running service
    #[arg(long, env = "FOREBAY_URL", value_name = "URL", default_value = "http://127.0.0.1:8080")]
    url: String,
    /// Key of role read for the service; set the variable rather than the option, which `ps` shows
    #[arg(long, env = "FOREBAY_KEY", hide_env_values = true, value_name = "KEY")]
    key: Option<ApiKey>,
    /// Certificate (PEM) to trust instead of the system's: the service's own, or that of the authority that signed it
    #[arg(long, env = "FOREBAY_CA", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Certificate and private key (PEM), for a service that requires client certificates
    #[arg(long, env = "FOREBAY_IDENTITY", value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Read from this database instead of a service: `sqlite:PATH` or `postgres://...`. It may be served meanwhile
    #[arg(long, value_name = "URL")]
    database: Option<String>,
}

/// A page of an export.
pub(super) enum Page {
    Rollouts(Vec<ExportedRollout>),
    /// Rows, as the service wrote them.
    Batch(RecordBatch),
}

/// An export that is being read.
pub(super) enum Source {
    Columns { client: Box<Client>, export: Box<Export>, columns: Box<Columns> },
    Database { reader: Box<ExportReader>, store: Arc<Store> },
}

impl PlaceArgs {
    /// Begins an export.
    pub(super) async fn open(self, selection: &Selection) -> anyhow::Result<Source> {
        match &self.database {
            Some(database) => open_database(database, selection).await,
            None => self.open_service(selection).await,
        }
    }

    async fn open_service(self, selection: &Selection) -> anyhow::Result<Source> {
        let read = |path: &PathBuf| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let options = ClientOptions {
            key: self.key.clone(),
            ca_pem: self.ca.as_ref().map(read).transpose()?,
            identity_pem: self.identity.as_ref().map(read).transpose()?,
            ..ClientOptions::default()
        };
        // A user waits at the terminal and can repeat the command, so the client does not retry.
        let client = Client::with_options(&self.url, &options)?.with_retry(RetryPolicy::none());
        let query = query(selection);
        let query: Vec<(&str, &str)> = query.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let policy = selection.policy.as_str();
        let export = client.export_arrow(policy, &query).await.map_err(|error| failed(&self.url, error))?;
        Ok(Source::Columns { client: Box::new(client), export: Box::new(export), columns: Box::default() })
    }
}

fn query(selection: &Selection) -> Vec<(&'static str, String)> {
    let names = |values: Vec<serde_json::Value>| {
        let names: Vec<&str> = values.iter().filter_map(serde_json::Value::as_str).collect();
        Some(names.join(",")).filter(|names| !names.is_empty())
    };
    let states = selection.state.iter().filter_map(|state| serde_json::to_value(state).ok()).collect();
    let verdicts = selection.verdict.iter().filter_map(|verdict| serde_json::to_value(verdict).ok()).collect();
    let given = [
        ("run", selection.run.map(|run| run.to_string())),
        ("state", names(states)),
        ("verdict", names(verdicts)),
        ("min_reward", selection.min_reward.map(|least| least.to_string())),
        ("where", selection.expression.clone()),
        ("summary", Some("true".to_owned())),
    ];
    given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Adds advice to an error if the solution is known.
fn failed(url: &str, error: ClientError) -> anyhow::Error {
    match error {
        ClientError::Transport(error) if error.is_connection_refused() => anyhow!(
            "nothing listens at {url}: start it with `forebay serve`, name another service with --url, or read a \
             database with --database"
        ),
        ClientError::Certificate(why) => anyhow!("{url}: {why} (--ca FILE, or FOREBAY_CA)"),
        error => error.into(),
    }
}

async fn open_database(database: &str, selection: &Selection) -> anyhow::Result<Source> {
    let compile = |text: &String| Expression::compile(text).map_err(|why| anyhow!("--where: {why}"));
    let filter = ExportFilter {
        states: selection.state.iter().copied().map(Into::into).collect(),
        verdicts: selection.verdict.iter().copied().map(Into::into).collect(),
        min_reward: selection.min_reward,
        expression: selection.expression.as_ref().map(compile).transpose()?.map(Arc::new),
    };
    let store = store::open_reading(database, Metrics::new().store()).await?;
    let reader = export::begin(Arc::clone(&store), selection.policy.clone(), selection.run.map(Run), filter).await;
    match reader {
        Ok(reader) => Ok(Source::Database { reader: Box::new(reader), store }),
        Err(error) => {
            store.close().await;
            Err(refused(error))
        }
    }
}

fn refused(error: BufferError) -> anyhow::Error {
    match error {
        BufferError::Refused(refusal @ Refusal::UnknownPolicy(_)) => anyhow!("{refusal}; `--policy` names another one"),
        error => anyhow::Error::new(error).context("the database cannot be read"),
    }
}

impl Source {
    /// The next page, or none at the end.
    pub(super) async fn page(&mut self) -> anyhow::Result<Option<Page>> {
        match self {
            Self::Database { reader, .. } => {
                let page = reader.next_page().await.map_err(refused)?;
                Ok(page.map(Page::Rollouts))
            }
            Self::Columns { export, columns, .. } => loop {
                if let Some(batch) = columns.next()? {
                    return Ok(Some(Page::Batch(batch)));
                }
                let Some(chunk) = export.chunk().await? else { return Ok(None) };
                columns.push(chunk);
            },
        }
    }

    /// Writes the media that the messages of a page name, and that are not in the folder yet.
    pub(super) async fn write_media(&self, page: &Page, folder: &mut MediaFolder) -> anyhow::Result<()> {
        let mut named = Vec::new();
        match page {
            Page::Rollouts(rollouts) => {
                for exported in rollouts {
                    let messages = exported.trajectory.messages.as_deref().map(RawValue::get);
                    named.extend(folder.named_first(messages, &[]));
                    for segment in &exported.trajectory.segments {
                        named.extend(folder.named_first(None, &segment.media));
                    }
                }
            }
            Page::Batch(batch) => {
                let texts = |name| batch.column_by_name(name).and_then(|column| column.as_string_opt::<i32>());
                for messages in texts("messages").into_iter().flatten().flatten() {
                    named.extend(folder.named_first(Some(messages), &[]));
                }
                for spans in texts("media").into_iter().flatten().flatten() {
                    let spans: Vec<MediaSpan> = serde_json::from_str(spans).context("the column media")?;
                    named.extend(folder.named_first(None, &spans));
                }
            }
        }
        named.retain(|digest| !folder.has(*digest));
        for digest in named {
            let bytes = match self {
                Self::Columns { client, .. } => client.media(&digest.to_string()).await?.map(|bytes| bytes.to_vec()),
                Self::Database { store, .. } => blobs::read(store, digest).await.map_err(refused)?,
            };
            let gone =
                || anyhow!("`forebay:{digest}` is gone: the rollout that names it was purged meanwhile; export again");
            folder.write(digest, &bytes.ok_or_else(gone)?)?;
        }
        Ok(())
    }

    /// Ends the export, and returns what it has and what it left out.
    pub(super) async fn end(self) -> anyhow::Result<ExportCounts> {
        match self {
            Self::Database { reader, store } => {
                let counts = reader.counts();
                store.close().await;
                Ok(counts)
            }
            Self::Columns { columns, .. } => columns.counts().context(NO_SUMMARY),
        }
    }
}

//! `GET /policies/{policy}/journal`: what operators and time did to a policy.

use axum::{Json as Answer, extract::State};
use forebay_wire::{JournalEntry, JournalPage, ListOrder};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        params::{self, PolicyPath, Query},
        problem::Failure,
    },
    openapi::{InvalidQuery, NoSuchPolicy},
};

/// Which entries to show.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct JournalQuery {
    /// The order of the entries; `oldest` when absent.
    order: Option<ListOrder>,
    /// The `next` of the previous page.
    after: Option<String>,
    /// The most entries in the page, at most 1,000.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// See what operators and time did to a policy
///
/// The newest 2,000 entries of a policy are kept.
#[utoipa::path(
    get,
    path = "/policies/{policy}/journal",
    operation_id = "list_journal",
    tag = "console",
    params(("policy" = String, Path, description = "Name of the policy"), JournalQuery),
    responses(
        (status = 200, description = "A page of entries", body = JournalPage),
        NoSuchPolicy,
        InvalidQuery,
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    Query(query): Query<JournalQuery>,
) -> Result<Answer<JournalPage>, Failure> {
    let limit = params::page_limit(query.limit)?;
    let from = params::cursor(query.order, query.after.as_deref())?;
    let page = api.buffer.journal(&policy, from, limit).await?;
    let entries = page.entries.into_iter().map(on_wire).collect();
    Ok(Answer(JournalPage { entries, next: params::next(page.next) }))
}

fn on_wire(entry: forebay_domain::looking::journal::JournalEntry) -> JournalEntry {
    JournalEntry {
        at: entry.at.to_string(),
        kind: entry.kind,
        key_id: entry.key_id.map(|key_id| key_id.as_str().to_owned()),
        detail: entry.detail,
    }
}

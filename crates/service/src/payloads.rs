//! Reads the payloads of a page of rollouts.

use forebay_domain::{
    formats::payload::Payload,
    samples::{SealedRow, pages::Members},
};
use forebay_store::{Store, error::StoreError};

/// Takes the next page of rollouts, and reads its payloads. A payload that is purged is none. The page is empty at the end.
pub(crate) async fn next_page<M: AsRef<SealedRow>>(
    store: &Store,
    members: &mut Members<M>,
) -> Result<Vec<(M, Option<Payload>)>, StoreError> {
    let page = members.take_page();
    let payloads = read_payloads(store, &page).await?;
    Ok(page.into_iter().zip(payloads).collect())
}

/// The payloads of rollouts, in their order. A payload that is purged is none.
pub(crate) async fn read_payloads(
    store: &Store,
    members: &[impl AsRef<SealedRow>],
) -> Result<Vec<Option<Payload>>, StoreError> {
    if members.is_empty() {
        return Ok(Vec::new());
    }
    let keys: Vec<_> = members.iter().map(|member| member.as_ref().rollout_pk).collect();
    let mut payloads = store.payloads(keys.clone()).await?.into_iter().peekable();
    let payload_of =
        |rollout_pk| payloads.next_if(|stored| stored.rollout_pk == rollout_pk).map(|stored| stored.payload);
    Ok(keys.into_iter().map(payload_of).collect())
}

//! Responses that are read and written page by page, so that a batch or an export is never held in memory as a whole.
//!
//! All readers share a byte budget. A reader waits for the bytes of a page before it reads the page, and gives them
//! back when the page is written to the connection. It waits only when it holds no page, so that readers cannot
//! deadlock.

use std::{io, sync::Arc, time::Duration};

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use forebay_bounds::budget::{Budget, Share, paid};
use forebay_service::error::BufferError;
use futures::{TryStreamExt as _, stream};

use crate::{
    Api,
    http::{accept::asks_for_zstd, body, compression::Compressor, problem::Failure},
};

/// How long a request waits for the bytes of its first page. After that it is refused and may be repeated.
pub(crate) const FIRST_PAGE_WAIT: Duration = Duration::from_secs(10);

/// Reads pages.
pub(crate) trait Reader: Send + 'static {
    /// Rows that were read. A writer takes one after the other, or all at once.
    type Page: Send + 'static;

    /// The bytes of the rows of the next page; 0 at the end.
    fn next_page_bytes(&mut self) -> impl Future<Output = Result<u64, BufferError>> + Send;

    /// The next page, or none at the end.
    fn next_page(&mut self) -> impl Future<Output = Result<Option<Self::Page>, BufferError>> + Send;
}

/// Writes pages in a format.
pub(crate) trait Writer<R: Reader>: Send + 'static {
    /// How many times a page is held: as stored, unpacked, as rows, and as a response.
    fn page_copies(&self) -> u64;

    /// Returns frames of the next rows of a page, and whether the page is complete.
    fn rows(&mut self, page: &mut R::Page) -> io::Result<(Vec<Bytes>, bool)>;

    /// Returns the end of the body.
    fn end(&mut self, reader: &R) -> io::Result<Vec<Bytes>>;
}

/// Responds with all pages. `what` names them in the log.
pub(crate) async fn respond<R: Reader, W: Writer<R>>(
    api: &Api,
    headers: &HeaderMap,
    what: &'static str,
    media: &'static str,
    mut reader: R,
    writer: W,
) -> Result<Response, Failure> {
    let budget = api.budgets.samples.clone();
    let granted = budget.wait_at_most(FIRST_PAGE_WAIT, page_cost(&mut reader, writer.page_copies()).await?).await?;
    // The first page is read before the head is sent, so that an error can still become a problem document.
    let page = PaidPage::read(&mut reader, granted).await?;
    let compressor = asks_for_zstd(headers).then(|| Compressor::new(&api.compressors)).flatten();
    let mut head = HeaderMap::new();
    head.insert(header::CONTENT_TYPE, HeaderValue::from_static(media));
    head.insert(header::VARY, HeaderValue::from_static("accept, accept-encoding"));
    if compressor.is_some() {
        head.insert(header::CONTENT_ENCODING, HeaderValue::from_static("zstd"));
    }
    let pages = Pages { what, budget, reader, writer, compressor, page, is_first: true, ended: false };
    let frames = stream::try_unfold(pages, Pages::frames)
        .map_ok(|frames| stream::iter(frames.into_iter().map(Ok::<_, io::Error>)));
    Ok((head, Body::from_stream(frames.try_flatten())).into_response())
}

/// The bytes that the next page of a reader takes from the budget.
async fn page_cost(reader: &mut impl Reader, copies: u64) -> Result<usize, BufferError> {
    let bytes = reader.next_page_bytes().await?.saturating_mul(copies);
    Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// A page with its share of the budget. The share also covers the response made of the page, until it is written.
struct PaidPage<P> {
    page: P,
    share: Arc<Share>,
}

impl<P> PaidPage<P> {
    async fn read<R: Reader<Page = P>>(reader: &mut R, share: Share) -> Result<Option<Self>, BufferError> {
        let page = reader.next_page().await?;
        Ok(page.map(|page| Self { page, share: Arc::new(share) }))
    }
}

/// A response body that is being written.
struct Pages<R: Reader, W> {
    what: &'static str,
    budget: Budget,
    reader: R,
    writer: W,
    compressor: Option<Compressor>,
    page: Option<PaidPage<R::Page>>,
    /// Whether the page that was read before the head is still to be written.
    is_first: bool,
    ended: bool,
}

impl<R: Reader, W: Writer<R>> Pages<R, W> {
    /// Returns the next frames. An error closes the connection, so that the client never takes damaged or incomplete
    /// rows for all of them.
    async fn frames(mut self) -> io::Result<Option<(Vec<Bytes>, Self)>> {
        if self.ended {
            return Ok(None);
        }
        let what = self.what;
        let broken = |failure: Failure| {
            let problem = failure.into_problem();
            tracing::warn!(problem.kind = problem.kind, "a stream of {what} was aborted");
            io::Error::other(problem.kind)
        };
        if self.page.is_none() && !std::mem::take(&mut self.is_first) {
            self.page = self.read().await.map_err(|error| broken(error.into()))?;
        }
        let write = move || self.write().map(|frames| (frames, self));
        let written = tokio::task::spawn_blocking(write).await.map_err(|_| broken(body::stopped()))??;
        Ok(Some(written))
    }

    async fn read(&mut self) -> Result<Option<PaidPage<R::Page>>, BufferError> {
        let cost = page_cost(&mut self.reader, self.writer.page_copies()).await?;
        let share = self.budget.wait_for(cost).await;
        PaidPage::read(&mut self.reader, share).await
    }

    /// Writes rows of the current page until a frame is full. After the last page, it writes the end of the body.
    fn write(&mut self) -> io::Result<Vec<Bytes>> {
        self.is_first = false;
        let Some(PaidPage { mut page, mut share }) = self.page.take() else {
            self.ended = true;
            let end = self.writer.end(&self.reader)?;
            let mut frames = self.compress(end)?;
            frames.extend(self.compressor.as_mut().map(Compressor::end).transpose()?);
            return Ok(frames);
        };
        let (frames, is_done) = self.writer.rows(&mut page)?;
        let frames = self.compress(frames)?;
        if is_done {
            drop(page);
            if let Some(share) = Arc::get_mut(&mut share) {
                share.shrink(frames.iter().map(Bytes::len).sum());
            }
        } else {
            self.page = Some(PaidPage { page, share: Arc::clone(&share) });
        }
        Ok(frames.into_iter().map(|frame| paid(frame, Arc::clone(&share))).collect())
    }

    fn compress(&mut self, frames: Vec<Bytes>) -> io::Result<Vec<Bytes>> {
        match &mut self.compressor {
            Some(compressor) => compressor.parts(frames),
            None => Ok(frames),
        }
    }
}

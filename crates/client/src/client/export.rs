//! An export that arrives: lines or columns as they come, so that it is never held in memory as a whole.

use bytes::Bytes;
use reqwest::Response;

use super::{error::ClientError, retry::Failure};

/// An export, in the order in which it arrives.
#[derive(Debug)]
pub struct Export {
    response: Response,
    partial: Vec<u8>,
    lines: usize,
}

impl Export {
    pub(super) fn new(response: Response) -> Self {
        Self { response, partial: Vec::new(), lines: 0 }
    }

    /// The next bytes as they arrive, or none at the end. If the stream ends early, the result is an error.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        self.response.chunk().await.map_err(|error| Failure::from(error).error)
    }

    /// The next whole lines, at least `bytes` of them unless the export ends, each with its line break. None at the
    /// end. If the stream ends early, the result is an error.
    pub async fn lines(&mut self, bytes: usize) -> Result<Option<Vec<u8>>, ClientError> {
        let mut found = std::mem::take(&mut self.partial);
        while let Some(chunk) = self.chunk().await? {
            found.extend_from_slice(&chunk);
            if found.len() < bytes {
                continue;
            }
            if let Some(end) = chunk.iter().rposition(|&byte| byte == b'\n') {
                self.partial = found.split_off(found.len() - chunk.len() + end + 1);
                self.count(&found);
                return Ok(Some(found));
            }
        }
        self.count(&found);
        match found.last() {
            None => Ok(None),
            Some(b'\n') => Ok(Some(found)),
            Some(_) => Err(ClientError::Truncated { lines: self.lines }),
        }
    }

    fn count(&mut self, found: &[u8]) {
        self.lines += found.split(|&byte| byte == b'\n').count() - 1;
    }
}

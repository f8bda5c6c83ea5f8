//! The stored form of a recorded call: packed columns behind a small header, and the text of its request and response.
//!
//! The columns have the form of a [`payload`](super::payload): `u32 length of the first part | u32 length of the second
//! part | header JSON | ids | log-probabilities`, little-endian.

use bytes::{Buf, BufMut};
use forebay_wire::VersionSpan;
use serde::{Deserialize, Serialize};

use super::{
    columns::{append_ids, append_little_endian, id_bytes, little_endian, put_ids},
    payload::{Damaged, TOO_SHORT, part, take, take_part},
};

/// What a call sampled, and the part of its prompt that no earlier call has.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallColumns {
    /// The ids of the prompt behind the shared ones.
    pub tail: Vec<i32>,
    /// The sampled ids.
    pub ids: Vec<i32>,
    /// Their log-probabilities.
    pub logprobs: Vec<f32>,
    /// The spans of versions that tile `ids`.
    pub versions: Vec<VersionSpan>,
    /// Whether the engine did not say the version of every id.
    pub version_assumed: bool,
    /// The stop sequence that ended the call, if one did.
    pub stop: Option<String>,
    /// The id of its answer, without the prefix of the API; none in calls of versions that did not store it.
    pub id: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    tail: usize,
    ids: usize,
    id_bytes: u8,
    versions: Vec<VersionSpan>,
    stop: Option<String>,
    version_assumed: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
}

impl CallColumns {
    /// The columns as bytes, and their BLAKE3 hash.
    #[must_use]
    pub fn pack(&self) -> (Vec<u8>, [u8; 32]) {
        let header = Header {
            tail: self.tail.len(),
            ids: self.ids.len(),
            id_bytes: id_bytes(&self.tail).max(id_bytes(&self.ids)),
            versions: self.versions.clone(),
            stop: self.stop.clone(),
            version_assumed: self.version_assumed,
            id: self.id.clone(),
        };
        let mut narrow = Vec::with_capacity(4 * (self.tail.len() + self.ids.len()));
        put_ids(&mut narrow, &self.tail, header.id_bytes);
        put_ids(&mut narrow, &self.ids, header.id_bytes);
        let header = serde_json::to_vec(&header).expect("a header is text and numbers");
        let (header_length, header) = part(&header);
        let (narrow_length, narrow) = part(&narrow);
        let mut body = Vec::with_capacity(8 + header.len() + narrow.len() + 4 * self.logprobs.len());
        body.put_u32_le(header_length);
        body.put_u32_le(narrow_length);
        body.put_slice(&header);
        body.put_slice(&narrow);
        body.put_slice(&little_endian(&self.logprobs));
        let digest = *blake3::hash(&body).as_bytes();
        (body, digest)
    }

    /// Checks the hash, and reads the columns.
    pub fn unpack(body: &[u8], digest: [u8; 32]) -> Result<Self, Damaged> {
        if blake3::hash(body) != blake3::Hash::from_bytes(digest) {
            return Err(Damaged("its digest differs"));
        }
        let mut rest = body;
        let header_length = rest.try_get_u32_le().map_err(|_| TOO_SHORT)?;
        let narrow_length = rest.try_get_u32_le().map_err(|_| TOO_SHORT)?;
        let header = take_part(&mut rest, header_length)?;
        let narrow = take_part(&mut rest, narrow_length)?;
        let header: Header = serde_json::from_slice(&header).map_err(|_| Damaged("its header is malformed"))?;
        let mut narrow = &*narrow;
        let mut column = |count: usize| {
            let bytes = take(&mut narrow, count.saturating_mul(header.id_bytes.into()))?;
            let mut ids = Vec::new();
            append_ids(&mut ids, bytes, header.id_bytes);
            Ok(ids)
        };
        let (tail, ids) = (column(header.tail)?, column(header.ids)?);
        let mut logprobs = Vec::new();
        append_little_endian(&mut logprobs, take(&mut rest, ids.len().saturating_mul(4))?);
        let Header { versions, version_assumed, stop, id, .. } = header;
        Ok(Self { tail, ids, logprobs, versions, version_assumed, stop, id })
    }
}

/// A text as stored: its length with the flag that says whether it is compressed, and its bytes.
#[must_use]
pub fn pack_text(text: &str) -> Vec<u8> {
    let (length, bytes) = part(text.as_bytes());
    let mut packed = Vec::with_capacity(4 + bytes.len());
    packed.put_u32_le(length);
    packed.put_slice(&bytes);
    packed
}

/// The text that [`pack_text`] packed.
pub fn unpack_text(mut packed: &[u8]) -> Result<String, Damaged> {
    let length = packed.try_get_u32_le().map_err(|_| TOO_SHORT)?;
    let bytes = take_part(&mut packed, length)?;
    String::from_utf8(bytes.into_owned()).map_err(|_| Damaged("it is not text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_comes_back_as_it_was_recorded() {
        let columns = CallColumns {
            tail: (0..5_000).map(|index| index % 300).collect(),
            ids: vec![1 << 20, 7],
            logprobs: vec![-0.5, -0.25],
            versions: vec![VersionSpan(3, 0, 2)],
            version_assumed: true,
            stop: Some("\n\n".to_owned()),
            id: Some("0192".to_owned()),
        };
        for columns in [columns, CallColumns::default()] {
            let (body, digest) = columns.pack();
            assert_eq!(CallColumns::unpack(&body, digest), Ok(columns));
        }
    }

    /// If this fails, the calls in existing databases cannot be read.
    #[test]
    fn the_stored_form_is_that_of_earlier_versions() {
        let columns = CallColumns {
            tail: vec![1, 300],
            ids: vec![7],
            logprobs: vec![-0.5],
            versions: vec![VersionSpan(3, 0, 1)],
            version_assumed: false,
            stop: Some("x".to_owned()),
            id: None,
        };
        let header = br#"{"tail":2,"ids":1,"id_bytes":2,"versions":[[3,0,1]],"stop":"x","version_assumed":false}"#;
        let mut stored = Vec::new();
        stored.put_u32_le(header.len() as u32);
        stored.put_u32_le(6);
        stored.put_slice(header);
        stored.put_slice(&[1, 0, 44, 1, 7, 0]);
        stored.put_f32_le(-0.5);
        let digest = *blake3::hash(&stored).as_bytes();
        assert_eq!(columns.pack(), (stored, digest));
        assert_eq!(pack_text("{}"), [2, 0, 0, 0, b'{', b'}']);
    }

    #[test]
    fn a_damaged_call_is_not_read() {
        let (mut body, digest) = CallColumns { ids: vec![1], logprobs: vec![-1.0], ..CallColumns::default() }.pack();
        *body.last_mut().expect("it has bytes") ^= 1;
        assert_eq!(CallColumns::unpack(&body, digest), Err(Damaged("its digest differs")));
    }

    #[test]
    fn texts_come_back() {
        for text in ["", "{}", &"again ".repeat(1_000)] {
            let packed = pack_text(text);
            assert_eq!(unpack_text(&packed).as_deref(), Ok(text));
            assert!(packed.len() <= 1_200, "long texts are compressed");
        }
    }
}

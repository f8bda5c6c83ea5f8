//! Columns as bytes: little-endian, whatever the machine's own order is.

use std::borrow::Cow;

/// A number of four bytes.
pub(super) trait Word: bytemuck::Pod {
    /// Its bytes, the lowest first.
    fn to_bytes(self) -> [u8; 4];

    /// The number of these bytes.
    fn from_bytes(bytes: [u8; 4]) -> Self;
}

impl Word for i32 {
    fn to_bytes(self) -> [u8; 4] {
        self.to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 4]) -> Self {
        Self::from_le_bytes(bytes)
    }
}

impl Word for f32 {
    fn to_bytes(self) -> [u8; 4] {
        self.to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 4]) -> Self {
        Self::from_le_bytes(bytes)
    }
}

/// A column's bytes; on nearly every machine these are the column itself.
pub(super) fn little_endian<T: Word>(column: &[T]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        return Cow::Borrowed(bytemuck::cast_slice(column));
    }
    Cow::Owned(column.iter().flat_map(|word| word.to_bytes()).collect())
}

/// The column of some bytes; what is left of an incomplete number at the end is ignored.
pub(super) fn from_little_endian<T: Word>(bytes: &[u8]) -> Vec<T> {
    bytes.as_chunks::<4>().0.iter().map(|&word| T::from_bytes(word)).collect()
}

//! Columns as bytes: little-endian on every machine.

use std::borrow::Cow;

/// A number of four bytes.
pub trait Word: bytemuck::Pod {
    /// Its bytes, the lowest first.
    fn to_bytes(self) -> [u8; 4];

    /// The number that these bytes encode.
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
pub fn little_endian<T: Word>(column: &[T]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        return Cow::Borrowed(bytemuck::cast_slice(column));
    }
    Cow::Owned(column.iter().flat_map(|word| word.to_bytes()).collect())
}

/// Appends the column that these bytes encode; an incomplete number at the end is ignored.
pub fn append_little_endian<T: Word>(column: &mut Vec<T>, bytes: &[u8]) {
    column.extend(bytes.as_chunks::<4>().0.iter().map(|&word| T::from_bytes(word)));
}

/// The number of bytes that every one of these ids fits in: 2, 3 or 4. No id is negative.
pub fn id_bytes(ids: &[i32]) -> u8 {
    match ids.iter().fold(0, |all, &id| all | id) {
        0..=0xFFFF => 2,
        0x1_0000..=0xFF_FFFF => 3,
        _ => 4,
    }
}

/// Appends ids in `width` bytes each.
pub fn put_ids(packed: &mut Vec<u8>, ids: &[i32], width: u8) {
    match width {
        2 => put_narrow::<2>(packed, ids),
        3 => put_narrow::<3>(packed, ids),
        _ => packed.extend_from_slice(&little_endian(ids)),
    }
}

fn put_narrow<const WIDTH: usize>(packed: &mut Vec<u8>, ids: &[i32]) {
    let start = packed.len();
    packed.resize(start + WIDTH * ids.len(), 0);
    for (place, id) in packed[start..].as_chunks_mut::<WIDTH>().0.iter_mut().zip(ids) {
        place.copy_from_slice(&id.to_le_bytes()[..WIDTH]);
    }
}

/// Appends the ids from bytes that [`put_ids`] wrote.
pub fn append_ids(ids: &mut Vec<i32>, bytes: &[u8], width: u8) {
    match width {
        2 => append_narrow::<2>(ids, bytes),
        3 => append_narrow::<3>(ids, bytes),
        _ => append_little_endian(ids, bytes),
    }
}

fn append_narrow<const WIDTH: usize>(ids: &mut Vec<i32>, bytes: &[u8]) {
    let wide = |bytes: &[u8; WIDTH]| {
        let mut word = [0; 4];
        word[..WIDTH].copy_from_slice(bytes);
        i32::from_le_bytes(word)
    };
    ids.extend(bytes.as_chunks::<WIDTH>().0.iter().map(wide));
}

/// Appends a mask, eight bits to a byte, lowest bit first.
pub fn put_bits(packed: &mut Vec<u8>, mask: &[u8]) {
    let byte = |bits: &[u8]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit);
    packed.extend(mask.chunks(8).map(byte));
}

/// Appends the first `count` bits of bytes that [`put_bits`] wrote.
pub fn append_bits(mask: &mut Vec<u8>, bytes: &[u8], count: usize) {
    let start = mask.len();
    mask.resize(start + 8 * bytes.len(), 0);
    for (eight, &byte) in mask[start..].as_chunks_mut::<8>().0.iter_mut().zip(bytes) {
        *eight = std::array::from_fn(|bit| byte >> bit & 1);
    }
    mask.truncate(start + count);
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn ids_come_back_from_as_few_bytes_as_they_fit(short in vec(0..=0xFFFF_i32, 0..20), long in vec(0..=i32::MAX, 0..20)) {
            for list in [short, long.iter().map(|id| id >> 7).collect(), long] {
                let mut packed = vec![7];
                put_ids(&mut packed, &list, id_bytes(&list));
                prop_assert_eq!(packed.len(), 1 + list.len() * usize::from(id_bytes(&list)));
                let mut appended = vec![9];
                append_ids(&mut appended, &packed[1..], id_bytes(&list));
                prop_assert_eq!((appended[0], &appended[1..]), (9, &list[..]));
            }
        }

        #[test]
        fn masks_come_back_from_bits(mask in vec(0..=1_u8, 0..40)) {
            let mut packed = vec![7];
            put_bits(&mut packed, &mask);
            prop_assert_eq!(packed.len(), 1 + mask.len().div_ceil(8));
            let mut appended = vec![9];
            append_bits(&mut appended, &packed[1..], mask.len());
            prop_assert_eq!((appended[0], &appended[1..]), (9, &mask[..]));
        }
    }
}

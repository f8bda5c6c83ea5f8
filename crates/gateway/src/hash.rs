//! Two small hashes with fixed results, unlike those of the standard library. Neither is for secrets.

/// FNV-1a of 64 bits.
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    fnv1a_on(0xcbf2_9ce4_8422_2325, bytes)
}

/// The hash of what has this hash, with more bytes behind it.
pub fn fnv1a_on(hash: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Spreads a change of any bit over all bits: the finalizer of `SplitMix64`.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

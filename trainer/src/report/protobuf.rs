//! Encodes protocol buffers, field by field.
//!
//! There is no code generator, because it would need the complete schemas of `TensorBoard` and Weights & Biases for the
//! few messages that are written here.

/// Appends an integer field.
pub(super) fn int_field(message: &mut Vec<u8>, field: u64, value: u64) {
    key(message, field, 0);
    varint(message, value);
}

/// Appends a field that contains text, bytes or another message.
pub(super) fn bytes_field(message: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    key(message, field, 2);
    varint(message, bytes.len() as u64);
    message.extend(bytes);
}

/// Appends a field of eight bytes.
pub(super) fn double_field(message: &mut Vec<u8>, field: u64, value: f64) {
    key(message, field, 1);
    message.extend(value.to_le_bytes());
}

/// Appends a field of four bytes.
pub(super) fn float_field(message: &mut Vec<u8>, field: u64, value: f32) {
    key(message, field, 5);
    message.extend(value.to_le_bytes());
}

fn key(message: &mut Vec<u8>, field: u64, wire_type: u64) {
    varint(message, field << 3 | wire_type);
}

fn varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

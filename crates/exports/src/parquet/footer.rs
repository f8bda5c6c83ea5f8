//! The end of a file in a form that readers of all years open.
//!
//! The library declares the order `IEEE_754_TOTAL_ORDER` for columns of floats, which is new in the format.
//! polars before 1.43 cannot open a file with an order that it does not know, and the library has no option for it. So
//! the footer is held back until it is complete, and then declares the order that every column had before. The order
//! says only what statistics mean, and columns of floats have none.

use std::io::{self, Write};

use parquet::errors::ParquetError;

/// An order is a union in Thrift's compact protocol: the field that is set, an empty struct, and the end of the union.
/// This is the field of `TYPE_ORDER`.
const TYPE_ORDER: u8 = 0x1c;

/// The field of `IEEE_754_TOTAL_ORDER`.
const TOTAL_ORDER: u8 = 0x2c;

const ORDER_BYTES: usize = 3;

/// What follows the orders, which are the last field of the metadata: the end of the metadata, its length, and `PAR1`.
const END_BYTES: usize = 1 + 4 + 4;

/// Passes on what is written, up to the footer.
pub(super) struct HeldFooter<W> {
    out: W,
    footer: Option<Vec<u8>>,
}

impl<W: Write> HeldFooter<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, footer: None }
    }

    /// Says that the footer follows.
    pub(super) fn begin(&mut self) {
        self.footer = Some(Vec::new());
    }

    /// Writes the footer of a file with so many columns.
    pub(super) fn end(&mut self, columns: usize) -> Result<(), ParquetError> {
        let mut footer = self.footer.take().unwrap_or_default();
        declare_type_order(&mut footer, columns).ok_or_else(|| {
            ParquetError::General("the footer does not end with the orders of its columns".to_owned())
        })?;
        self.out.write_all(&footer)?;
        Ok(self.out.flush()?)
    }
}

impl<W: Write> Write for HeldFooter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.footer {
            Some(footer) => footer.write(bytes),
            None => self.out.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.footer.is_some() { Ok(()) } else { self.out.flush() }
    }
}

/// Declares `TYPE_ORDER` for every column; none if the orders are not where they are expected.
fn declare_type_order(footer: &mut [u8], columns: usize) -> Option<()> {
    let end = footer.len().checked_sub(END_BYTES)?;
    let begin = end.checked_sub(columns * ORDER_BYTES)?;
    for order in footer[begin..end].chunks_exact_mut(ORDER_BYTES) {
        match order {
            [field @ (TYPE_ORDER | TOTAL_ORDER), 0, 0] => *field = TYPE_ORDER,
            _ => return None,
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_footer_of_another_form_is_not_changed_into_a_wrong_one() {
        let footer = |orders: &[u8]| [&[0x2c, 0xfc][..], orders, b"\0\x10\0\0\0PAR1"].concat();
        let mut known = footer(&[TOTAL_ORDER, 0, 0, TYPE_ORDER, 0, 0]);
        assert_eq!(declare_type_order(&mut known, 2), Some(()));
        assert_eq!(known, footer(&[TYPE_ORDER, 0, 0, TYPE_ORDER, 0, 0]));
        for (orders, columns) in
            [(&[0x3c, 0, 0][..], 1), (&[TOTAL_ORDER, 0, 1], 1), (&[TOTAL_ORDER, 0, 0], 9), (&[], 1)]
        {
            assert_eq!(declare_type_order(&mut footer(orders), columns), None, "{orders:?}");
        }
    }
}

//! Columns of log-probabilities in fewer bytes than floats have, to the last bit.
//!
//! An engine makes a log-probability of a float near 1, in one of two ways. With `log_softmax`, which vLLM uses,
//! that of the likeliest token is minus the logarithm of the sum of all `exp(logit - largest logit)`, which is 1 and
//! something. With `log(softmax)`, which SGLang uses, it is the logarithm of the probability. So what a float of a likely
//! token says is how many floats lie between 1 and that sum or probability: a small number `n`, while the logarithm of it
//! has 23 random bits. On recorded rollouts of a real vLLM, 97% of log-probabilities are such logarithms, rounded to
//! the nearest float; half of them have an `n` below 65,536.
//!
//! A column is coded under the [`Law`] that fits it, or left as it is. Two bits for each value, the controls, say how many
//! bytes its `n` has: 0 to 3. A value whose bits are not those of the logarithm of any such float takes five bytes: its own
//! four, and one that says so. So a column that fits no law costs bytes and never a bit.
//!
//! The logarithm is our own, because a library's may differ in the last place from machine to machine, and what one machine
//! has packed another one unpacks. It adds, multiplies and divides only, which is the same everywhere.

use multiversion::multiversion;

use super::{
    columns::{append_little_endian, little_endian},
    payload::{Damaged, TOO_SHORT, take},
};

/// Intervals of a binade, for each of which the logarithm is a table's value and a short series.
const INTERVALS: usize = 128;

/// Bits of the place in an interval.
const PLACE_BITS: u32 = 16;

/// Its third byte marks a value without a number. The two low bytes beside it are those of the value; the two high bytes of
/// all such values come behind all numbers.
const ESCAPE: u32 = 0xFF << 16;

const ONE: u32 = 1.0_f32.to_bits();

const LN_2: f64 = ln(2.0);

/// Values that show whether a column is worth coding, and under which law.
const PROBED: usize = 128;

/// How a value follows from the number `n` of floats between 1 and another float.
#[derive(Clone, Copy, Debug)]
enum Law {
    /// The value is minus the logarithm of the `n`th float above 1.
    OfSum = 1,
    /// The value is the logarithm of the `n`th float below 1.
    OfProbability = 2,
}

/// A column without a law.
const PLAIN: u8 = 0;

/// What a logarithm needs, for one law.
struct Table {
    /// -1 for sums, and 1 for probabilities.
    sign: f64,
    /// Logarithms of the ends of the intervals, without their sign.
    log: [f64; INTERVALS],
    /// By which a place in an interval is multiplied, to be the argument of the series.
    scale: [f64; INTERVALS],
}

static OF_SUM: Table = table(Law::OfSum);
static OF_PROBABILITY: Table = table(Law::OfProbability);

const fn table(law: Law) -> Table {
    let sign = match law {
        Law::OfSum => -1.0,
        Law::OfProbability => 1.0,
    };
    let mut table = Table { sign, log: [0.0; INTERVALS], scale: [0.0; INTERVALS] };
    let mut index = 0;
    while index < INTERVALS {
        // The end of the interval that is nearer to 1: sums rise from 1 to 2, probabilities fall from 1 to 1/2.
        let (end, unit) = match law {
            Law::OfSum => (1.0 + index as f64 / 128.0, 1.0 / 8_388_608.0),
            Law::OfProbability => (1.0 - index as f64 / 256.0, 1.0 / 16_777_216.0),
        };
        table.log[index] = -sign * ln(end);
        table.scale[index] = sign * unit / end;
        index += 1;
    }
    table
}

/// The natural logarithm of a number from 1/2 to 2, by the series of its inverse hyperbolic tangent.
const fn ln(number: f64) -> f64 {
    let tangent = (number - 1.0) / (number + 1.0);
    let (mut power, mut sum, mut odd) = (tangent, 0.0, 1.0);
    while odd < 40.0 {
        sum += power / odd;
        power *= tangent * tangent;
        odd += 2.0;
    }
    2.0 * sum
}

impl Law {
    fn table(self) -> &'static Table {
        match self {
            Self::OfSum => &OF_SUM,
            Self::OfProbability => &OF_PROBABILITY,
        }
    }
}

impl Table {
    /// The value of an `n` below [`ESCAPE`].
    #[expect(clippy::inline_always, reason = "only inlined code has the instruction set of its caller")]
    #[inline(always)]
    fn value(&self, number: u32) -> f32 {
        let interval = (number >> PLACE_BITS) as usize % INTERVALS;
        let place = f64::from(number & ((1 << PLACE_BITS) - 1));
        let binade = f64::from(number >> (PLACE_BITS + 7));
        // -ln(1 - s) = s + s^2 / 2 + ...; s is at most 2^-7, so what is left out is 2^-37 of it.
        let s = place * self.scale[interval];
        let series = s + s * s * ((1.0 / 2.0 + s * (1.0 / 3.0)) + s * s * (1.0 / 4.0 + s * (1.0 / 5.0)));
        // Zero without a sign, as engines send it.
        0.0 - (binade * LN_2 + self.log[interval] + self.sign * series) as f32
    }

    /// The `n` of each value, or [`ESCAPE`].
    fn numbers(&self, values: &[f32; BLOCK]) -> [u32; BLOCK] {
        let (mut numbers, mut is_sure) = ([0; BLOCK], [false; BLOCK]);
        guess(self.sign, values, &mut numbers, &mut is_sure);
        for ((value, number), is_sure) in values.iter().zip(&mut numbers).zip(is_sure) {
            let is_value = *number < ESCAPE && (is_sure || self.value(*number).to_bits() == value.to_bits());
            *number = if is_value { *number } else { ESCAPE };
        }
        numbers
    }
}

/// The `n` that is nearest to each value, and whether the value is surely that of it. There are no branches and no tables, so
/// that a processor computes several at once: this takes a third of the time with AVX2 or AVX-512, of which each machine
/// uses what it has. The results are the same.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512dq+avx512bw", "x86_64+avx2"))]
fn guess(sign: f64, values: &[f32; BLOCK], numbers: &mut [u32; BLOCK], is_sure: &mut [bool; BLOCK]) {
    for ((value, number), is_sure) in values.iter().zip(numbers).zip(is_sure) {
        // exp(s) - 1 = s + s^2 / 2 + ...
        let s = f64::from(*value) * (sign / 64.0);
        let mut excess =
            s * (1.0 + s * (1.0 / 2.0 + s * (1.0 / 6.0 + s * (1.0 / 24.0 + s * (1.0 / 120.0 + s * (1.0 / 720.0))))));
        // exp(2 s) - 1 from that, six times.
        for _ in 0..6 {
            excess *= 2.0 + excess;
        }
        let float = (1.0 + excess) as f32;
        let above = float.to_bits().wrapping_sub(ONE);
        *number = if sign < 0.0 { above } else { above.wrapping_neg() };
        // The logarithms of two numbers that are this close differ by what they differ by, so the nearest float is the value if
        // that is less than half of its last place, by more than what a logarithm is wrong by. Below a power of two, places
        // are half as large.
        let below = (value.to_bits() & 0x7FFF_FFFF).saturating_sub(1);
        let half_a_place = f32::from_bits(below & 0x7F80_0000) * (1.0 / 16_777_216.0);
        let differs = (f64::from(float) - 1.0 - excess).abs();
        let is_nearest = differs < 0.999 * f64::from(half_a_place) * (1.0 + excess);
        // Far from zero the series is no exponential.
        let is_near = (-2.0..=0.0).contains(value);
        *is_sure = (is_nearest & is_near) | (value.to_bits() == 0);
    }
}

/// The values of numbers below [`ESCAPE`], several at once as well.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512dq+avx512bw", "x86_64+avx2"))]
fn values(table: &Table, numbers: &[u32; BLOCK], values: &mut [f32; BLOCK]) {
    for (value, number) in values.iter_mut().zip(numbers) {
        *value = table.value(*number);
    }
}

/// Values that are coded together.
const BLOCK: usize = 64;

/// Blocks of a column. The last one is filled up with zeros.
fn blocks(column: &[f32]) -> impl Iterator<Item = ([f32; BLOCK], usize)> {
    column.chunks(BLOCK).map(|chunk| {
        let mut block = [0.0; BLOCK];
        block[..chunk.len()].copy_from_slice(chunk);
        (block, chunk.len())
    })
}

/// Appends a column: its law and the controls to `narrow`, which is compressed with other small numbers, and what does not
/// compress to `bytes`.
pub fn put(narrow: &mut Vec<u8>, bytes: &mut Vec<u8>, column: &[f32]) {
    let start = (narrow.len(), bytes.len());
    bytes.reserve(4 * column.len());
    if let Some(law) = law_of(column) {
        narrow.push(law as u8);
        let length_at = narrow.len();
        narrow.extend([0; 4]);
        put_coded(law.table(), narrow, bytes, column);
        let length = bytes.len() - start.1;
        if is_worth_it(length + column.len() / 4, column.len()) {
            // A column has fewer bytes than a body may have.
            narrow[length_at..length_at + 4].copy_from_slice(&(length as u32).to_le_bytes());
            return;
        }
        narrow.truncate(start.0);
        bytes.truncate(start.1);
    }
    narrow.push(PLAIN);
    bytes.extend_from_slice(&little_endian(column));
}

/// Decoding takes time, so a small saving is not worth it.
fn is_worth_it(bytes: usize, values: usize) -> bool {
    bytes < values * 4 / 8 * 7
}

/// The law under which a column is worth coding, by a few of its values. Zeros say nothing: they are also what stands for
/// tokens that are not trained.
fn law_of(column: &[f32]) -> Option<Law> {
    let probed: Vec<f32> = column.iter().copied().filter(|value| *value != 0.0).take(PROBED).collect();
    let with_unknown = |law: Law| {
        let numbers = blocks(&probed).map(|(values, _)| law.table().numbers(&values));
        (numbers.flatten().filter(|number| *number == ESCAPE).count(), law)
    };
    let of_each = [Law::OfSum, Law::OfProbability].map(with_unknown);
    let (unknown, best) = of_each.into_iter().min_by_key(|(unknown, _)| *unknown)?;
    (2 * unknown <= probed.len()).then_some(best)
}

/// Bytes that are written at once; those that a number has count.
const WORD: usize = 4;

fn put_coded(table: &Table, narrow: &mut Vec<u8>, bytes: &mut Vec<u8>, column: &[f32]) {
    let mut coded = [0; BLOCK * WORD];
    let mut halves = Vec::new();
    for (values, count) in blocks(column) {
        let numbers = table.numbers(&values);
        let mut end = 0;
        for (values, numbers) in values[..count].chunks(4).zip(numbers.chunks(4)) {
            let mut controls = 0;
            for (place, (&value, &number)) in values.iter().zip(numbers).enumerate() {
                let mut number = number;
                if number == ESCAPE {
                    number |= value.to_bits() & 0xFFFF;
                    halves.extend_from_slice(&value.to_le_bytes()[2..]);
                }
                let length = usize::from(number > 0) + usize::from(number > 0xFF) + usize::from(number > 0xFFFF);
                coded[end..end + WORD].copy_from_slice(&number.to_le_bytes());
                end += length;
                controls |= length << (2 * place);
            }
            narrow.push(controls as u8);
        }
        bytes.extend_from_slice(&coded[..end]);
    }
    bytes.extend_from_slice(&halves);
}

/// Appends the next column of `count` values to others.
pub fn take_column(narrow: &mut &[u8], bytes: &mut &[u8], column: &mut Vec<f32>, count: usize) -> Result<(), Damaged> {
    let law = match take(narrow, 1)? {
        [PLAIN] => {
            append_little_endian(column, take(bytes, count.saturating_mul(4))?);
            return Ok(());
        }
        [law] if *law == Law::OfSum as u8 => Law::OfSum,
        [law] if *law == Law::OfProbability as u8 => Law::OfProbability,
        _ => return Err(Damaged("a column has an unknown law")),
    };
    let length = take(narrow, 4)?.try_into().map_err(|_| TOO_SHORT)?;
    let controls = take(narrow, count.div_ceil(4))?;
    let coded = take(bytes, u32::from_le_bytes(length) as usize)?;
    append_coded(law.table(), controls, coded, column, count)
}

/// Appends `count` values.
fn append_coded(
    table: &Table,
    controls: &[u8],
    mut coded: &[u8],
    column: &mut Vec<f32>,
    count: usize,
) -> Result<(), Damaged> {
    const MASKS: [u32; 4] = [0, 0xFF, 0xFFFF, 0xFF_FFFF];
    let start = column.len();
    let mut escaped = Vec::new();
    let mut numbers = [0; BLOCK];
    for (block, controls) in controls.chunks(BLOCK / 4).enumerate() {
        for (four, controls) in numbers.chunks_exact_mut(4).zip(controls) {
            let lengths = [0, 2, 4, 6].map(|shift| usize::from(controls >> shift & 3));
            let mut last = [0; 16];
            let ahead = coded.first_chunk::<16>().unwrap_or_else(|| {
                // The last bytes, and zeros.
                last[..coded.len()].copy_from_slice(coded);
                &last
            });
            let mut at = 0;
            for (number, length) in four.iter_mut().zip(lengths) {
                let word = [ahead[at], ahead[at + 1], ahead[at + 2], 0];
                *number = u32::from_le_bytes(word) & MASKS[length];
                at += length;
            }
            coded = coded.get(at..).ok_or(TOO_SHORT)?;
        }
        let places = BLOCK * block..count.min(BLOCK * (block + 1));
        for (place, &number) in places.clone().zip(&numbers) {
            if number >= ESCAPE {
                escaped.push((place, number & 0xFFFF));
            }
        }
        let mut block = [0.0; BLOCK];
        values(table, &numbers, &mut block);
        column.extend_from_slice(&block[..places.len()]);
    }
    let (halves, rest) = coded.as_chunks::<2>();
    if halves.len() < escaped.len() {
        return Err(TOO_SHORT);
    }
    if halves.len() > escaped.len() || !rest.is_empty() {
        return Err(Damaged("a column has more bytes than its controls say"));
    }
    for ((place, low), high) in escaped.into_iter().zip(halves) {
        column[start + place] = f32::from_bits(low | u32::from(u16::from_le_bytes(*high)) << 16);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// The bytes of a column, after checking that it comes back as it was, behind another one.
    fn bytes_of(column: &[f32]) -> usize {
        let (mut narrow, mut bytes) = (Vec::new(), Vec::new());
        put(&mut narrow, &mut bytes, column);
        let (mut narrow_left, mut bytes_left) = (&narrow[..], &bytes[..]);
        let mut found = vec![7.0];
        take_column(&mut narrow_left, &mut bytes_left, &mut found, column.len()).expect("it is not damaged");
        assert!(narrow_left.is_empty() && bytes_left.is_empty());
        let bits = |column: &[f32]| column.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&found[1..]), bits(column));
        narrow.len() + bytes.len()
    }

    /// Log-probabilities as engines make them: of sums and of probabilities, of tokens that are likelier the lower `odds` is.
    fn likely(odds: f64) -> [Vec<f32>; 2] {
        let others = (1..4_000).map(|index| odds * f64::from(index * 7_919 % 4_001) / 4_001.0);
        let of_sum = others.clone().map(|others| 0.0 - f64::from((1.0 + others) as f32).ln() as f32).collect();
        let of_probability = others.map(|others| f64::from((1.0 / (1.0 + others)) as f32).ln() as f32).collect();
        [of_sum, of_probability]
    }

    #[test]
    fn the_logarithm_is_that_of_the_float_to_the_nearest() {
        for (law, float) in [(Law::OfSum, 1), (Law::OfProbability, -1_i64)] {
            let table = law.table();
            let numbers = (0..70_000).chain((70_000..ESCAPE).step_by(997));
            let wrong = |number: &u32| {
                let float = f32::from_bits((i64::from(ONE) + float * i64::from(*number)) as u32);
                table.value(*number).to_bits() != (0.0 - f64::from(float).ln().abs() as f32).to_bits()
            };
            // Of hardly any is the logarithm so close to the middle of two floats that the wrong one is taken.
            assert!(numbers.clone().filter(wrong).count() <= 2, "{law:?}");
            let missed = numbers.filter(|number| table.numbers(&[table.value(*number); BLOCK])[0] == ESCAPE).count();
            // Above 1, several numbers have the same logarithm, and the nearest of them may have another one.
            assert!(missed < 200, "{law:?}: {missed}");
        }
    }

    #[test]
    fn likelier_tokens_take_fewer_bytes() {
        for (odds, most) in [(1e-5, 5_100), (1e-3, 9_000), (1.0, 13_100)] {
            for column in likely(odds) {
                let bytes = bytes_of(&column);
                assert!(bytes < most, "{bytes} bytes for {} values at {odds}", column.len());
            }
        }
        // Tokens that are not trained have zeros.
        assert!(bytes_of(&[vec![0.0; 3_000], likely(1e-3)[1].clone()].concat()) < 9_800);
        assert_eq!(bytes_of(&[0.0; 4_000]), 1_005);
    }

    #[test]
    fn no_float_has_the_number_of_another_one() {
        // Floats of all exponents, and all near 227, where the series is 1 again.
        let all = (0..=u32::MAX).step_by(4_099).map(f32::from_bits);
        let near = [226.5_f32, -226.5].into_iter().flat_map(|end| (end.to_bits()..).take(150_000).map(f32::from_bits));
        let values: Vec<f32> = all.chain(near).collect();
        for table in [&OF_SUM, &OF_PROBABILITY] {
            for (values, count) in blocks(&values) {
                for (value, number) in values.iter().zip(table.numbers(&values)).take(count) {
                    assert!(
                        number == ESCAPE || table.value(number).to_bits() == value.to_bits(),
                        "{value} is not {number}"
                    );
                }
            }
        }
        for value in [227.5, 227.75, -227.0, -2.0, -1.0] {
            bytes_of(&[value; 4]);
        }
    }

    #[test]
    fn floats_around_powers_of_two_come_back() {
        let power = |exponent: u32| (2.0_f32.powi(-(exponent as i32))).to_bits();
        let around = (0..40).flat_map(|exponent| power(exponent) - 40..=power(exponent) + 40);
        let around: Vec<f32> = around.map(|bits| -f32::from_bits(bits)).chain([0.0, -0.0]).collect();
        for column in likely(1e-3) {
            bytes_of(&[column, around.clone()].concat());
        }
    }

    #[test]
    fn what_is_no_logarithm_of_a_float_near_one_stays_as_it_is() {
        let column: Vec<f32> = (0..4_000).map(|index| -(index as f32 * 0.37).sin().abs()).collect();
        assert_eq!(bytes_of(&column), 1 + 4 * column.len());
        assert_eq!(bytes_of(&[]), 1);
        // A column that begins like one that is worth coding.
        let late = [likely(1e-3)[0][..200].to_vec(), column].concat();
        assert_eq!(bytes_of(&late), 1 + 4 * late.len());
    }

    #[test]
    fn damage_is_noticed_and_never_read_beyond() {
        let (mut narrow, mut bytes) = (Vec::new(), Vec::new());
        put(&mut narrow, &mut bytes, &[likely(1e-3)[0][..100].to_vec(), vec![f32::NAN]].concat());
        let take = |narrow: &[u8], bytes: &[u8]| {
            take_column(&mut &narrow[..], &mut &bytes[..], &mut Vec::new(), 101).expect_err("it is damaged")
        };
        assert_eq!(take(&narrow, &bytes[1..]), TOO_SHORT);
        assert_eq!(take(&narrow[..narrow.len() - 1], &bytes), TOO_SHORT);
        assert_eq!(take(&[&[9], &narrow[1..]].concat(), &bytes), Damaged("a column has an unknown law"));
        let length = |narrow: &[u8], by: i32| {
            let length = u32::from_le_bytes(narrow[1..5].try_into().expect("it has four bytes"));
            [&narrow[..1], &length.wrapping_add_signed(by).to_le_bytes(), &narrow[5..]].concat()
        };
        assert_eq!(take(&length(&narrow, -1), &bytes), TOO_SHORT);
        let more = [&bytes[..], &[0]].concat();
        assert_eq!(take(&length(&narrow, 1), &more), Damaged("a column has more bytes than its controls say"));
    }

    proptest! {
        #[test]
        fn any_floats_come_back(bits in vec(any::<u32>(), 0..40), near in vec(0_u32..ESCAPE, 0..200), at in 0_usize..240) {
            // Mostly logarithms, so that the column is coded, with any floats in between.
            for law in [Law::OfSum, Law::OfProbability] {
                let mut column: Vec<f32> = near.iter().map(|number| law.table().value(*number)).collect();
                let at = at.min(column.len());
                column.splice(at..at, bits.iter().map(|bits| f32::from_bits(*bits)));
                bytes_of(&column);
            }
        }
    }
}

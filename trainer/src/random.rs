//! Reproducible random numbers: one generator with independent streams.
//!
//! libtorch's own generator is global to the process and differs between devices, so a seed would not make a run
//! reproducible.

use std::f64::consts::TAU;

use rand::RngExt;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use tch::{Kind, Tensor};

/// One stream of a seed; equal seeds and streams give equal numbers on every machine.
#[derive(Debug)]
pub(crate) struct Random(ChaCha8Rng);

impl Random {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        generator.set_stream(stream);
        Self(generator)
    }

    /// Uniform in [0, 1), from 32 random bits.
    pub(crate) fn uniform(&mut self) -> f64 {
        f64::from(self.0.random::<u32>()) / 2f64.powi(32)
    }

    /// Standard normal numbers of shape `shape`, float32 on the CPU, by the Box-Muller transform.
    pub(crate) fn normal(&mut self, shape: &[i64]) -> Tensor {
        let length = shape.iter().product::<i64>();
        let pairs = (length + 1) / 2;
        let radius = (self.uniform_tensor(pairs).log() * -2.0).sqrt();
        let angle = self.uniform_tensor(pairs) * TAU;
        let normal = Tensor::cat(&[&radius * angle.cos(), radius * angle.sin()], 0);
        normal.narrow(0, 0, length).to_kind(Kind::Float).reshape(shape)
    }

    /// `[length]` float64, uniform in (0, 1).
    fn uniform_tensor(&mut self, length: i64) -> Tensor {
        let mut bytes = vec![0; 4 * length as usize];
        self.0.fill(&mut bytes[..]);
        // The bits are read as i32, in [-2^31, 2^31).
        let integers = Tensor::from_data_size(&bytes, &[length], Kind::Int).to_kind(Kind::Double);
        (integers + (2f64.powi(31) + 0.5)) / 2f64.powi(32)
    }
}

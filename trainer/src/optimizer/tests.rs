use tch::Device;

use super::*;
use crate::head::tests::scattered;

/// Two parameters, a matrix `w` that decays and a vector `b` that does not; f64.
struct Model {
    w: Tensor,
    b: Tensor,
}

impl Model {
    fn new() -> Self {
        Self {
            w: Tensor::from_slice(&[1.0_f64, -2.0, 0.5, 3.0]).view([2, 2]).set_requires_grad(true),
            b: Tensor::from_slice(&[0.1_f64, -0.3]).set_requires_grad(true),
        }
    }

    fn optimizer(&self, config: OptimizerConfig) -> AdamW {
        let named = [("w", &self.w), ("b", &self.b)].map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone()));
        AdamW::new(config, named).expect("it is valid")
    }

    /// Gradients 3 k w^2 and 2 b.
    fn backward(&self, k: f64) {
        ((&self.w * &self.w * &self.w).sum(Kind::Double) * k + self.b.square().sum(Kind::Double)).backward();
    }

    fn train(&self, optimizer: &mut AdamW, steps: std::ops::RangeInclusive<i32>) -> Vec<f64> {
        let step = |k| {
            optimizer.zero_grad();
            self.backward(f64::from(k));
            optimizer.step(0.01).expect("gradients are finite").gradient_norm
        };
        steps.map(step).collect()
    }
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.flatten(0, -1)).expect("it is a vector of f64")
}

fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-12 * expected.abs().max(1.0), "{found} is not {expected}");
    }
}

fn unclipped() -> OptimizerConfig {
    OptimizerConfig { clip_norm: 0.0, ..OptimizerConfig::default() }
}

#[test]
fn the_first_step_holds_by_hand() {
    // m / (1 - b1) = g and v / (1 - b2) = g^2, so every weight first decays and then moves by lr in the direction of
    // -g.
    let model = Model::new();
    model.train(&mut model.optimizer(unclipped()), 1..=1);
    let moved = |decayed: f64, g: f64| decayed - 0.01 * g / (g.abs() + 1e-8);
    let w = [(1.0, 3.0), (-2.0, 12.0), (0.5, 0.75), (3.0, 27.0)].map(|(w, g)| moved(w * 0.999, g));
    close(&numbers(&model.w), &w);
    close(&numbers(&model.b), &[(0.1, 0.2), (-0.3, -0.6)].map(|(b, g)| moved(b, g)));
}

#[test]
fn three_steps_give_the_numbers_of_torch() {
    let model = Model::new();
    let mut optimizer = model.optimizer(unclipped());
    model.train(&mut optimizer, 1..=3);
    let w = [0.967_817_859_038_906_9, -2.023_105_694_779_047, 0.469_259_547_742_892_3, 2.961_861_821_789_166];
    close(&numbers(&model.w), &w);
    close(&numbers(&model.b), &[0.070_139_705_099_843_34, -0.270_032_130_842_628_95]);
    let (name, state) = optimizer.state().last().expect("it has two");
    assert_eq!(name, "w");
    let mean = [1.632_659_890_838_141_3, 6.805_720_416_534_294, 0.396_930_356_631_305_3, 14.967_210_749_619_737];
    close(&numbers(&state.mean), &mean);
    let square = [2.332_210_922_768_169_3, 40.975_879_870_098_25, 0.136_840_051_343_946_17, 196.966_505_703_332_47];
    close(&numbers(&state.square), &square);
}

#[test]
fn clipped_steps_give_the_numbers_of_torch() {
    let model = Model::new();
    let mut optimizer = model.optimizer(OptimizerConfig::default());
    let norms = model.train(&mut optimizer, 1..=3);
    close(&norms, &[29.714_684_921_768_896, 59.058_722_025_963_64, 88.052_710_348_728_64]);
    let w = [0.967_046_642_344_489_3, -2.023_986_112_342_625, 0.468_566_095_486_751_7, 2.961_040_972_799_752_4];
    close(&numbers(&model.w), &w);
    close(&numbers(&model.b), &[0.072_314_072_995_874_33, -0.271_987_486_819_588_1]);
}

#[test]
fn blocks_change_nothing() {
    let start = scattered(&[3, 300_000], 1.0).to_kind(Kind::Float);
    let gradient = scattered(&[3, 300_000], 2.0).to_kind(Kind::Float);
    // A transposed parameter is not contiguous, so it is updated as a whole.
    let run = |parameter: Tensor, gradient: Tensor| {
        let parameter = parameter.set_requires_grad(true);
        let named = [("w".to_owned(), parameter.shallow_clone())];
        let mut optimizer = AdamW::new(OptimizerConfig::default(), named).expect("it is valid");
        for _ in 0..2 {
            optimizer.zero_grad();
            (&parameter * &gradient).sum(Kind::Float).backward();
            optimizer.step(0.1).expect("gradients are finite");
        }
        parameter.detach()
    };
    let blocks = run(start.copy(), gradient.copy());
    let whole = run(start.copy().tr(), gradient.copy().tr()).tr();
    assert!(blocks.allclose(&whole, 1e-6, 1e-7, false));
    assert!(!blocks.allclose(&start, 1e-6, 1e-7, false));
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let model = Model::new();
    let mut optimizer = model.optimizer(OptimizerConfig { ema_decay: 0.5, ..OptimizerConfig::default() });
    model.train(&mut optimizer, 1..=1);
    let (w, mean) = (numbers(&model.w), numbers(&optimizer.state().last().expect("it has two").1.mean));
    optimizer.zero_grad();
    (model.w.sum(Kind::Double) * f64::INFINITY).backward();
    assert!(matches!(optimizer.step(0.01), Err(OptimizerError::NonFinite { .. })));
    assert_eq!(optimizer.steps(), 1);
    assert_eq!(numbers(&model.w), w);
    assert_eq!(numbers(&optimizer.state().last().expect("it has two").1.mean), mean);
}

#[test]
fn a_restored_optimizer_goes_on_bit_for_bit() {
    let config = OptimizerConfig { ema_decay: 0.9, ..OptimizerConfig::default() };
    let straight = Model::new();
    let mut optimizer = straight.optimizer(config);
    straight.train(&mut optimizer, 1..=2);
    let saved: BTreeMap<String, ParameterState> = optimizer
        .state()
        .map(|(name, state)| {
            let average = state.average.map(|average| average.copy());
            (name.to_owned(), ParameterState { mean: state.mean.copy(), square: state.square.copy(), average })
        })
        .collect();
    let resumed = Model {
        w: straight.w.detach().copy().set_requires_grad(true),
        b: straight.b.detach().copy().set_requires_grad(true),
    };
    let mut again = resumed.optimizer(config);
    again.restore(2, &saved).expect("it fits");
    straight.train(&mut optimizer, 3..=5);
    resumed.train(&mut again, 3..=5);
    assert_eq!((numbers(&straight.w), numbers(&straight.b)), (numbers(&resumed.w), numbers(&resumed.b)));
    let average = |optimizer: &AdamW| {
        let (_, state) = optimizer.state().last().expect("it has two");
        numbers(&state.average.expect("it keeps one"))
    };
    assert_eq!(average(&optimizer), average(&again));
    assert_eq!(again.steps(), 5);
}

#[test]
fn a_state_that_does_not_fit_is_refused_whole() {
    let model = Model::new();
    let mut optimizer = model.optimizer(OptimizerConfig::default());
    let state = |shape: [i64; 1]| {
        let zeros = Tensor::zeros(shape, (Kind::Double, Device::Cpu));
        ParameterState { mean: zeros.copy(), square: zeros, average: None }
    };
    let missing = BTreeMap::from([("b".to_owned(), state([2]))]);
    let error = optimizer.restore(1, &missing).expect_err("w is missing");
    assert_eq!(error.to_string(), "state of parameter w: it is missing");
    let foreign = BTreeMap::from([("x".to_owned(), state([2]))]);
    assert!(optimizer.restore(1, &foreign).is_err());
    let misshapen = BTreeMap::from([("b".to_owned(), state([2])), ("w".to_owned(), state([4]))]);
    assert!(optimizer.restore(1, &misshapen).is_err());
    assert_eq!(optimizer.steps(), 0);
}

#[test]
fn the_average_follows_the_weights() {
    let model = Model::new();
    let mut optimizer = model.optimizer(OptimizerConfig { ema_decay: 0.75, ..unclipped() });
    let before = numbers(&model.w);
    model.train(&mut optimizer, 1..=1);
    let expected: Vec<f64> =
        before.iter().zip(numbers(&model.w)).map(|(before, after)| 0.75 * before + 0.25 * after).collect();
    let (_, state) = optimizer.state().last().expect("it has two");
    close(&numbers(&state.average.expect("it keeps one")), &expected);
}

#[test]
fn what_cannot_train_is_refused() {
    let model = Model::new();
    assert!(matches!(model.optimizer(OptimizerConfig::default()).step(0.1), Err(OptimizerError::NoGradient)));
    let half = [("w".to_owned(), Tensor::zeros([2], (Kind::BFloat16, Device::Cpu)))];
    let error = AdamW::new(OptimizerConfig::default(), half).expect_err("it is 16-bit");
    assert_eq!(error.to_string(), "parameter w is BFloat16, must be Float or Double");
    let twice = ["w", "w"].map(|name| (name.to_owned(), model.w.shallow_clone()));
    assert!(matches!(AdamW::new(OptimizerConfig::default(), twice), Err(OptimizerError::Duplicate(_))));
    let error = OptimizerConfig { beta2: 1.0, ..OptimizerConfig::default() }.validate().expect_err("v never moves");
    assert_eq!(error.to_string(), "beta2 is 1, must be in [0, 1)");
}

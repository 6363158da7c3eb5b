// Package flow samples from flow-matching models and computes the log-probs of its steps.
//
// A model gives the velocity v(x, sigma) of the path x = (1-sigma)*data + sigma*noise,
// so v predicts noise - data. A rollout starts from noise at sigma = 1 and takes T
// steps down a list of T+1 sigmas to data at sigma = 0. Each step is one transition:
//
//	sde        Flow-GRPO's stochastic step         has a log-prob
//	cps        coefficients-preserving sampling    has a log-prob
//	dance_sde  DanceGRPO's stochastic step         has a log-prob
//	ddim       DDPO's stochastic step              has a log-prob
//	ode        deterministic, by a Solver          has none
//
// The main types:
//
//   - Plan says how to sample: sigmas, transitions, solver, storage type and seeds.
//   - Sample runs a Plan to its end. Rollout runs the same loop one velocity at a time,
//     for a service that evaluates many rollouts in one batch.
//   - StepTransition is one step. It draws the next latents and scores observed ones.
//   - Schedule computes the sigmas, Window chooses the stochastic steps.
//
// # Reproducibility
//
// Noise is counter based (StepNoise): a step's noise depends on the sample's seed
// and the step index alone, not on which other steps drew any. Latents are rounded to
// the plan's storage type before they are scored, and the chain goes on from the
// rounded value, so Score on stored latents returns the same float64 bits as the
// rollout did. Per-element arithmetic is float32, coefficients and reductions are
// float64, reductions have one fixed order.
//
// Every product that feeds a sum is converted explicitly, as in float32(a*x) + y.
// The conversion forbids the compiler a fused multiply-add, which some
// architectures would use and others not; with it all give the same bits. For the
// same reason logarithm, sine, cosine and exponential are the package's own.
package flow

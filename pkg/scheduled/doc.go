// Package scheduled is the mathematics of scheduled sampling: a diffusion model is trained on latents that it made
// itself. With some probability a sample starts at a source, a few levels noisier than the level t that it is trained
// at (its target). The model denoises it step by step from the source to t, without gradients. The result replaces the
// usual latent at t, which mixes data and noise (teacher forcing). ReflexFlow (arXiv 2512.04904) adds two terms to the
// loss of these samples.
//
//	Settings.Draw     returns a Plan: which samples are rolled out, and from which source; a function of a seed
//	Ramp.At           the probability at a training step
//	Roller            rolls out one sample; the caller evaluates the model, so many samples can share one batch
//	Roll              the same as one loop that calls the model
//	ReflexFlow.Terms  the terms of the loss, in float64, without gradients
//	Plan.Metrics      the numbers to log
//
// There are two modes (Compat). Exact does what the options say. SimpleTuner does what the code of that name does, step
// by step, also where it differs from its options.
//
// A latent at a level is x = a*x0 + u*noise. A flow model has u = t/(N-1) and a = 1-u. A variance-preserving model,
// which predicts epsilon or v, has a = sqrt(abar_t) and u = sqrt(1-abar_t). Products that go into sums are converted
// explicitly, and logarithms are those of pkg/flow, so that plans and latents have the same bits on every machine.
package scheduled

// Package scheduled is the mathematics of scheduled sampling: training a diffusion model on
// latents that it made itself. With some probability a sample starts a few levels noisier
// than the level t it is trained at, the model steps it down to t without gradient, and
// what it lands on takes the place of the latent made of data and noise (the
// teacher-forced one). ReflexFlow (arXiv 2512.04904) adds two terms to the loss of those.
//
//	Settings.Draw     which samples roll, and from where: a Plan, a function of a seed
//	Ramp.At           the probability at a training step
//	Roller            one sample, from its source down to its target, turned inside out
//	                  for a service that evaluates many in one batch; Roll is the loop
//	ReflexFlow.Loss   the loss side, in float64, without gradients
//	Plan.Metrics, Loss.Metrics   the numbers to log
//
// Two ways are offered. Exact does what the options say. SimpleTuner does what the code of
// that name does, step for step, where it differs: see Compat.
//
// Levels are written as x = a*x0 + u*noise. A flow model has u = t/(N-1), a = 1-u; a
// variance-preserving one, which predicts epsilon or v, has a = sqrt(abar_t) and
// u = sqrt(1-abar_t). Products that feed sums are converted explicitly, and logarithms
// are pkg/flow's own, so that plans and rolled latents have the same bits everywhere.
package scheduled

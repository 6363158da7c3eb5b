// Package tensor is the seam between networks and what computes them: a [Device] holds
// weights and runs passes, a [Session] has the operations, [Matrix] and [Image] are views
// of memory that only the device can read. Networks are written once, over these.
//
// Package cpu is the device of every machine, package reference the slow and obvious one
// in float64 that others are measured against, package tensortest the suite that each
// passes.
//
// [DType] is the element types of files and events, with conversions.
package tensor

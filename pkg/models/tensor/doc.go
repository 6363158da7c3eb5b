// Package tensor is the interface between networks and the devices that compute them. A
// [Device] holds weights and runs passes; a [Session] is one pass, with its operations and
// its memory; [Matrix] and [Image] are views of memory that only the device can read.
// Networks are written once, with these types.
//
// A factor is a matrix that products and attentions multiply; some devices store factors in
// bf16. An epilogue is what happens to a product before it is stored, such as adding a bias.
//
// Package cpu is the device that every machine has. Package reference is a slow and simple
// device in float64, which others are compared with. Package tensortest is the test suite
// that every device passes.
//
// [DType] is an element type of files and events, with conversions.
package tensor

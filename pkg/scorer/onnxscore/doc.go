// Package onnxscore scores images with a network in an ONNX file: the reward function
// onnx:NAME.
//
// It takes networks with one input, images [N, 3, H, W] or [N, H, W, 3] in float32 or
// uint8, and one number per image somewhere in the output [N, ...] in float32: aesthetic
// predictors, classifiers, and CLIP-score-shaped exports that have the embedding of one
// fixed text inside. The prompt is not shown to the network: a score that depends on it
// needs the text side of the model too, so it belongs behind an http or nats scorer.
//
// ONNX Runtime is a C++ library. Programs have it when they are built with cgo and the tag
// onnx; the library itself is loaded at the start from the path in LibraryVariable. In all
// other builds New returns an error that says so.
package onnxscore

// LibraryVariable is the environment variable with the path of the ONNX Runtime library.
const LibraryVariable = "ONNXRUNTIME_LIB"

// libraryHelp says where to get the library.
const libraryHelp = "libonnxruntime.so of a release at github.com/microsoft/onnxruntime, or of `pip install onnxruntime`: " +
	"onnxruntime/capi/libonnxruntime.so.* in the site-packages"

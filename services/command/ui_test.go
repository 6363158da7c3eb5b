package command

import "testing"

func TestUI_Usage(t *testing.T) {
	inEmptyDir(t)
	expect(
		t,
		exitUsage,
		`--listen: "0.0.0.0:80"; others reach it there, so set a token in MEANDER_UI_TOKEN`,
		"ui",
		"--listen",
		"0.0.0.0:80",
	)
	expect(t, exitUsage, `--listen: "80"; must be host:port`, "ui", "--listen", "80")
	expect(t, exitUsage, `--host: "http://x/"; must be a name`, "ui", "--host", "http://x/")
	expect(t, exitUsage, "--tokenizer: open tokenizer: ", "ui", "--tokenizer", "nowhere")
	expect(t, exitUsage, "--ui-listen: given without the page; add --ui", "up", "--ui-listen", "127.0.0.1:0")
	expect(t, exitUsage, `--ui-listen: "80"; must be host:port`, "up", "--ui", "--ui-listen", "80")
	expect(t, exitUsage, "takes no arguments", "ui", "now")
}

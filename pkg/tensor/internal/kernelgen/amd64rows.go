package main

func rowsAMD64(w *writer) {}

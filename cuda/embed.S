/* The bytes of one fatbin as read-only data: from IMAGE to IMAGE_end, both hidden. */

#define JOIN(a, b) a##b
#define END(image) JOIN(image, _end)

    .section .rodata
    .balign 64
    .globl IMAGE
    .hidden IMAGE
    .type IMAGE, %object
IMAGE:
    .incbin FATBIN
    .globl END(IMAGE)
    .hidden END(IMAGE)
END(IMAGE):
    .size IMAGE, END(IMAGE) - IMAGE

    .section .note.GNU-stack, "", %progbits
